"""The Kafka clients: settings, fetcher, transactional writer, queries. The only importer of ``confluent_kafka``."""
