//! Private Postgres and RabbitMQ for development and tests.
