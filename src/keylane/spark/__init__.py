"""The Spark edge: the data source, its planner, the options and the query."""
