-- History only grows. Row triggers on the parents are cloned to every partition; TRUNCATE triggers cannot be, so
-- `make_partition` puts one on each. A trigger is the second witness: the runtime role has no right to begin with.
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: history is append-only', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation', CONSTRAINT = 'append_only';
END $$;
CREATE TRIGGER events_append_only BEFORE UPDATE OR DELETE ON events
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER postings_append_only BEFORE UPDATE OR DELETE ON postings
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER events_no_truncate BEFORE TRUNCATE ON events
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER postings_no_truncate BEFORE TRUNCATE ON postings
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

-- Double entry: the postings of an event sum to zero per asset. One check a statement, over all rows it inserted.
CREATE FUNCTION check_sum_zero() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM new_rows GROUP BY position, asset HAVING sum(amount) <> 0) THEN
        RAISE EXCEPTION 'the postings of an event do not sum to zero'
            USING ERRCODE = 'check_violation', CONSTRAINT = 'postings_sum_zero';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER postings_sum_zero AFTER INSERT ON postings REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION check_sum_zero();
