"""The Kafka edge: consumer, producer, topics and one task's run. Uses librdkafka through confluent-kafka."""
