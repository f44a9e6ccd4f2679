//! Where the load goes: a service on this machine, whichever way its name resolves.
//!
//! Never lets anything but loopback through.

use anyhow::{Context, Result, ensure};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A service that is there takes a connection at once; one under load may have its backlog full.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The address of a name, which must be of this machine whichever way it resolves.
///
/// # Errors
/// When it does not resolve, or not to loopback only.
pub fn loopback(host: &str, port: u16) -> Result<SocketAddr> {
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("{host} does not resolve"))?
        .collect();
    ensure!(
        addresses.iter().all(|address| address.ip().is_loopback()),
        "{host} is not loopback: a load test stays on its own machine"
    );
    // The service listens on IPv4 unless it was told otherwise.
    addresses
        .iter()
        .find(|address| address.is_ipv4())
        .or(addresses.first())
        .copied()
        .with_context(|| format!("{host} has no address"))
}

/// Where events are posted.
#[derive(Clone, Debug)]
pub struct Target {
    address: SocketAddr,
    /// The same as a request names it.
    pub(super) authority: String,
}

impl Target {
    /// Reads an address such as `http://127.0.0.1:8080`.
    ///
    /// # Errors
    /// When it is of another form, or not loopback.
    pub fn new(url: &str) -> Result<Self> {
        let authority = url
            .strip_prefix("http://")
            .map(|rest| rest.trim_end_matches('/'))
            .filter(|rest| !rest.contains(['/', '@', '?', '#']))
            .context("the service's address is not of the form http://127.0.0.1:8080")?;
        let (host, port) = authority
            .rsplit_once(':')
            .context("the service's address has no port")?;
        let port: u16 = port.parse().context("the service's port")?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Ok(Target {
            address: loopback(host, port).context("the service's address")?,
            authority: authority.to_owned(),
        })
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// When nobody listens there.
    pub async fn connect(&self) -> Result<TcpStream> {
        let stream = timeout(CONNECT_TIMEOUT, TcpStream::connect(self.address))
            .await
            .map_err(std::io::Error::from)
            .flatten()
            .with_context(|| format!("the service at {}", self.authority))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_service_of_this_machine_is_loaded() {
        for good in [
            "http://127.0.0.1:8080",
            "http://localhost:1/",
            "http://[::1]:1",
        ] {
            assert!(Target::new(good).is_ok(), "{good}");
        }
        for bad in [
            "http://192.0.2.1:8080",
            "http://0.0.0.0:8080",
            "https://127.0.0.1:8080",
            "http://127.0.0.1",
            "http://127.0.0.1:8080/x",
            "http://127.0.0.1@192.0.2.1:80",
            "127.0.0.1:8080",
        ] {
            assert!(Target::new(bad).is_err(), "{bad}");
        }
    }
}
