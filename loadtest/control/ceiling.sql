-- Four hundred events in one transaction.
SELECT control_batch(400, :users::bigint, :record::text);
