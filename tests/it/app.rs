//! A service of its own for a test: all of it in this process, on ports of its own, on the test's ledger.

use crate::ledger::{Ledger, service};
use daybook::auth;
use daybook::config::Config;
use daybook::domain::{Scope, Subject};
use daybook::service::{Listeners, Roles, Service};
use reqwest::header::HeaderMap;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;
use tokio::net::TcpListener;

/// The keys file of this run, with one HS256 key.
pub fn keys_file() -> PathBuf {
    static KEYS: OnceLock<PathBuf> = OnceLock::new();
    KEYS.get_or_init(|| {
        let scratch =
            std::env::var_os("TEST_SCRATCH_DIR").expect("TEST_SCRATCH_DIR is set by `make test`");
        let path = PathBuf::from(scratch).join(format!("keys-{:016x}.json", rand::random::<u64>()));
        auth::generate_dev_keys(&path).unwrap();
        path
    })
    .clone()
}

/// A token for a day.
pub fn token(subject: &str, scopes: &[Scope]) -> String {
    let subject = Subject::parse(subject).unwrap();
    let day = Duration::from_secs(24 * 3_600);
    auth::issue(&keys_file(), &subject, scopes, day, jiff::Timestamp::now()).unwrap()
}

/// A user's own token.
pub fn user(subject: &str) -> String {
    token(subject, &[Scope::Read, Scope::Write])
}

/// A token that may do everything.
pub fn admin() -> String {
    token("admin", &Scope::ALL)
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body, as it came.
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// A header's text.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// Asserts a problem document of this status and code.
    #[track_caller]
    pub fn refused(&self, status: u16, code: &str) {
        assert_eq!(
            (self.status, self.json()["code"].as_str()),
            (status, Some(code)),
            "{}",
            self.body
        );
        assert_eq!(self.header("content-type"), "application/problem+json");
        assert_eq!(self.json()["status"], status);
    }

    /// Asserts the status and gives the body as JSON.
    #[track_caller]
    pub fn ok(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.body);
        self.json()
    }
}

/// A running service.
pub struct App {
    /// Base address of the API.
    pub url: String,
    /// Base address of probes and metrics.
    pub ops: String,
    client: reqwest::Client,
    service: Service,
}

/// A configuration for this ledger.
pub fn config(ledger: &Ledger) -> Config {
    Config {
        ledger: ledger.name.clone(),
        database_url: ledger.url.clone(),
        amqp_url: service("TEST_AMQP_URL"),
        keys_file: Some(keys_file()),
        lanes: 2,
        pool_size: 4,
        request_timeout_ms: 60_000,
        ..Config::default()
    }
}

impl App {
    /// Starts one of all roles.
    pub async fn start(ledger: &Ledger) -> Self {
        Self::with(config(ledger), Roles::ALL).await
    }

    /// Starts one.
    pub async fn with(config: Config, roles: Roles) -> Self {
        let free = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let listeners = Listeners {
            api: Some(free().await),
            ops: free().await,
        };
        let service = Service::start(config, roles, listeners).await.unwrap();
        App {
            url: format!("http://{}", service.api_addr.unwrap()),
            ops: format!("http://{}", service.ops_addr),
            client: reqwest::Client::builder()
                .timeout(Duration::from_secs(120))
                .build()
                .unwrap(),
            service,
        }
    }

    /// Sends a request.
    pub async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        let response = request.send().await.unwrap();
        Answer {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            body: response.text().await.unwrap(),
        }
    }

    /// A request to be completed.
    pub fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        self.client
            .request(method.parse().unwrap(), format!("{}{path}", self.url))
    }

    /// Posts an event under a key.
    pub async fn post(&self, token: &str, key: &str, body: &str) -> Answer {
        let request = self
            .request("POST", "/v1/events")
            .bearer_auth(token)
            .header("Idempotency-Key", key)
            .header("Content-Type", "application/json")
            .body(body.to_owned());
        self.send(request).await
    }

    /// Gets a path.
    pub async fn get(&self, token: &str, path: &str) -> Answer {
        self.send(self.request("GET", path).bearer_auth(token))
            .await
    }

    /// Gets a path of the operations port.
    pub async fn ops(&self, path: &str) -> Answer {
        self.send(self.client.get(format!("{}{path}", self.ops)))
            .await
    }

    /// Pays euros in cents from `world` to a user.
    pub async fn fund(&self, subject: &str, cents: u64) -> Answer {
        let body = format!(
            r#"{{"type":"deposit","schema":"1.7","subject":"{subject}","data":{{"asset":"EUR/2","amount":"{cents}"}}}}"#
        );
        let answer = self
            .post(
                &admin(),
                &format!("fund-{:016x}", rand::random::<u64>()),
                &body,
            )
            .await;
        answer.ok(201);
        answer
    }

    /// Stops it.
    pub async fn stop(self) {
        self.service.stop().await;
    }
}

/// The body of a transfer of euros in cents.
pub fn transfer(to: &str, cents: u64) -> String {
    format!(
        r#"{{"type":"transfer","schema":"1.7","data":{{"to":"{to}","asset":"EUR/2","amount":"{cents}"}}}}"#
    )
}
