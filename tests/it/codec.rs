//! The amounts on the wire against Postgres' own text and its own binary form.
//!
//! Needs Postgres: what it prints and sends is the reference, never a second codec of ours.

use bytes::BytesMut;
use daybook::domain::Amount;
use daybook::store::numeric::Numeric;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, NoTls};

async fn connect() -> Client {
    let url =
        std::env::var("TEST_DATABASE_URL").expect("TEST_DATABASE_URL is missing: run `make test`");
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// The edges of every length and 500 random values of random lengths.
fn values() -> Vec<Amount> {
    let mut units: Vec<i128> = vec![0, 9_999, 10_000, 99_990_000, 100_000_001];
    let mut power: i128 = 1;
    for _ in 0..38 {
        units.extend([power, power - 1, power + 1]);
        power *= 10;
    }
    units.push(Amount::MAX.units());
    for _ in 0..500 {
        let whole = rand::random::<i128>() % Amount::MAX.units();
        units.push(whole / 10i128.pow(rand::random::<u32>() % 38));
    }
    let both = units.into_iter().flat_map(|units| [units, -units]);
    both.map(|units| Amount::new(units).unwrap()).collect()
}

#[tokio::test]
async fn postgres_reads_what_we_write() {
    let client = connect().await;
    let values = values();
    let sent: Vec<Numeric> = values.iter().copied().map(Numeric).collect();
    let rows = client
        .query("SELECT unnest($1::numeric[])::text", &[&sent])
        .await
        .unwrap();
    let texts: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    let ours: Vec<String> = values.iter().map(Amount::to_string).collect();
    assert_eq!(texts, ours);
}

#[tokio::test]
async fn we_read_what_postgres_writes() {
    let client = connect().await;
    let values = values();
    let texts: Vec<String> = values.iter().map(Amount::to_string).collect();
    let sql = "SELECT n, numeric_send(n) FROM unnest($1::text[]) WITH ORDINALITY AS t(text, place), \
               LATERAL (SELECT text::numeric AS n) AS number ORDER BY place";
    let rows = client.query(sql, &[&texts]).await.unwrap();
    assert_eq!(rows.len(), values.len());
    for (row, value) in rows.iter().zip(values) {
        assert_eq!(row.get::<_, Numeric>(0), Numeric(value));
        let mut bytes = BytesMut::new();
        Numeric(value).to_sql(&Type::NUMERIC, &mut bytes).unwrap();
        assert_eq!(
            row.get::<_, Vec<u8>>(1),
            bytes,
            "{value} has another binary form"
        );
    }
}

#[tokio::test]
async fn what_is_no_amount_is_an_error() {
    let client = connect().await;
    let texts = vec![
        "NaN",
        "Infinity",
        "-Infinity",
        "1.5",
        "-0.5",
        "1e38",
        "-1e38",
        "1e131071",
        "1e-16383",
        "10000.0001",
    ];
    let sql = "SELECT text, text::numeric FROM unnest($1::text[]) AS t(text)";
    let rows = client.query(sql, &[&texts]).await.unwrap();
    assert_eq!(rows.len(), texts.len());
    for row in rows {
        let text: String = row.get(0);
        assert!(
            row.try_get::<_, Numeric>(1).is_err(),
            "{text} became an amount"
        );
    }
}
