//! The operations port: probes and metrics, without a token. The network keeps it inside.
//!
//! Liveness depends on nothing: a pod must not be killed because its database is away.

use crate::store::reads::{self, PARTITIONS_NEEDED};
use crate::telemetry::{Kind, Metrics};
use axum::Router;
use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::http::{Response, StatusCode};
use axum::routing::get;
use deadpool_postgres::Pool;
use jiff::{SignedDuration, Timestamp};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How long readiness may take.
const READINESS_TIMEOUT: Duration = Duration::from_secs(1);
/// How far the clocks of pod and database may be apart.
pub const CLOCKS_APART_MAX: SignedDuration = SignedDuration::from_secs(60);

/// What the operations port needs.
#[derive(Clone, Debug)]
pub struct Ops {
    /// The API's read pool, for its gauges.
    pub pool: Pool,
    /// Readiness's own connection: reads that fill the API's pool must not turn a pod away.
    pub probe: Pool,
    /// What is encoded.
    pub metrics: Arc<Metrics>,
    /// The migration that this binary was built for.
    pub schema_version: i64,
    /// True from the stop signal on: a pod that stops takes no new connections.
    pub stopping: watch::Receiver<bool>,
}

/// The operations port's routes.
pub fn ops_router(ops: Ops) -> Router {
    let ready = ops.clone();
    Router::new()
        .route("/livez", get(|| async { text(StatusCode::OK, "ok\n") }))
        .route(
            "/readyz",
            get(move || {
                let ops = ready.clone();
                async move {
                    match unready(&ops).await {
                        None => text(StatusCode::OK, "ok\n"),
                        Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, &format!("{why}\n")),
                    }
                }
            }),
        )
        .route(
            "/metrics",
            get(move || {
                let ops = ops.clone();
                async move { metrics(&ops) }
            }),
        )
}

fn text(status: StatusCode, body: &str) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_owned()));
    *response.status_mut() = status;
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// Why the pod cannot serve now; None when it can.
async fn unready(ops: &Ops) -> Option<String> {
    if *ops.stopping.borrow() {
        return Some("stopping".to_owned());
    }
    let reading = async {
        let client = ops.probe.get().await.map_err(|error| error.to_string())?;
        reads::readiness(&client)
            .await
            .map_err(|error| error.to_string())
    };
    let found = match tokio::time::timeout(READINESS_TIMEOUT, reading).await {
        Err(_) => return Some("database: no answer within 1 s".to_owned()),
        Ok(Err(error)) => {
            tracing::debug!(error, "not ready");
            return Some("database: not available".to_owned());
        }
        Ok(Ok(found)) => found,
    };
    judge(&found, ops.schema_version, Timestamp::now())
}

fn judge(found: &reads::Readiness, schema_version: i64, now: Timestamp) -> Option<String> {
    // A newer schema serves an older binary: a rolling update has both for a while.
    if found
        .schema_version
        .is_none_or(|version| version < schema_version)
    {
        let is = found
            .schema_version
            .map_or("none".to_owned(), |version| version.to_string());
        return Some(format!(
            "schema: version {is}, needed {schema_version} or newer; run daybook migrate"
        ));
    }
    if found.partitions != PARTITIONS_NEEDED {
        return Some(format!(
            "partitions: {} of {PARTITIONS_NEEDED} attached",
            found.partitions
        ));
    }
    let apart = now.duration_since(found.now).abs();
    (apart > CLOCKS_APART_MAX)
        .then(|| format!("clocks: pod and database are {} s apart", apart.as_secs()))
}

fn metrics(ops: &Ops) -> Response<Body> {
    let status = ops.pool.status();
    for (kind, value) in [
        ("size", status.size),
        ("available", status.available),
        ("waiting", status.waiting),
    ] {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        ops.metrics.pool.get_or_create(&Kind { kind }).set(value);
    }
    let mut body = String::new();
    if prometheus_client::encoding::text::encode(&mut body, &ops.metrics.registry).is_err() {
        return text(StatusCode::INTERNAL_SERVER_ERROR, "metrics: not encoded\n");
    }
    let mut response = text(StatusCode::OK, &body);
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_names_what_is_missing() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let good = reads::Readiness {
            now,
            schema_version: Some(3),
            partitions: PARTITIONS_NEEDED,
        };
        assert_eq!(judge(&good, 3, now), None);
        assert!(judge(&good, 4, now).unwrap().starts_with("schema"));
        assert_eq!(judge(&good, 2, now), None);
        let short = reads::Readiness {
            partitions: 3,
            ..good
        };
        assert!(judge(&short, 3, now).unwrap().starts_with("partitions"));
        let late = now - SignedDuration::from_secs(61);
        assert!(judge(&good, 3, late).unwrap().starts_with("clocks"));
    }
}
