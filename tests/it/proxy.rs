//! A way to Postgres that can lose the answer to COMMIT: what a network does, on demand.

use secrecy::{ExposeSecret, SecretString};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_postgres::config::Host;

/// What happens to the next COMMIT that passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The server commits; its answer is lost and the client's connection ends.
    Answer,
    /// The client's connection ends first; the server gets the COMMIT only when [`Proxy::release`] is called.
    Delayed,
    /// The COMMIT itself is lost; both connections end.
    Request,
}

/// A proxy in front of the test's Postgres.
pub struct Proxy {
    /// The database's URL through it.
    pub url: SecretString,
    armed: Arc<AtomicBool>,
    /// Told when the COMMIT has met its fate.
    pub lost: Arc<Notify>,
    release: Arc<Notify>,
}

/// The simple query COMMIT: type, length, text, zero.
const COMMIT: &[u8] = b"Q\x00\x00\x00\x0bCOMMIT\x00";

impl Proxy {
    /// Starts one that loses the first COMMIT after [`Proxy::arm`].
    pub async fn start(url: &SecretString, loss: Loss) -> Self {
        let config: tokio_postgres::Config = url.expose_secret().parse().unwrap();
        let Host::Tcp(host) = config.get_hosts()[0].clone() else {
            panic!("a TCP address")
        };
        let server = (host, config.get_ports()[0]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let through = url
            .expose_secret()
            .replace(&format!(":{}/", server.1), &format!(":{port}/"));
        let armed = Arc::new(AtomicBool::new(false));
        let (lost, release) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let shared = (armed.clone(), lost.clone(), release.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(server.clone()).await.unwrap();
                tokio::spawn(carry(client, server, loss, shared.clone()));
            }
        });
        Proxy {
            url: through.into(),
            armed,
            lost,
            release,
        }
    }

    /// From now on the next COMMIT is lost; those after it pass.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    /// Lets a delayed COMMIT go on to the server.
    pub fn release(&self) {
        self.release.notify_one();
    }
}

async fn carry(
    client: TcpStream,
    server: TcpStream,
    loss: Loss,
    (armed, lost, release): (Arc<AtomicBool>, Arc<Notify>, Arc<Notify>),
) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let back = tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(count) = from_client.read(&mut bytes).await {
        if count == 0 {
            break;
        }
        let commits = bytes[..count]
            .windows(COMMIT.len())
            .any(|window| window == COMMIT);
        if commits && armed.swap(false, Ordering::SeqCst) {
            // Ending the way back first makes sure that no answer passes.
            back.abort();
            let _ = back.await;
            drop(from_client);
            match loss {
                Loss::Request => {}
                Loss::Answer => {
                    to_server.write_all(&bytes[..count]).await.unwrap();
                    // A Terminate behind it: the server closes only after it has committed.
                    to_server.write_all(b"X\x00\x00\x00\x04").await.unwrap();
                }
                Loss::Delayed => {
                    lost.notify_one();
                    release.notified().await;
                    to_server.write_all(&bytes[..count]).await.unwrap();
                    to_server.write_all(b"X\x00\x00\x00\x04").await.unwrap();
                    return;
                }
            }
            lost.notify_one();
            return;
        }
        if to_server.write_all(&bytes[..count]).await.is_err() {
            break;
        }
    }
    back.abort();
}
