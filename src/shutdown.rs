//! The stop signal, as a value that everything long-lived watches.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Becomes true at the first SIGTERM or SIGINT.
///
/// # Errors
/// When the system does not let the process listen.
pub fn signals() -> std::io::Result<watch::Receiver<bool>> {
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        // Nobody may be listening any more.
        let _ = stop.send(true);
    });
    Ok(stopped)
}

/// Resolves when the signal is there, or can no longer come.
pub async fn wait(mut stopped: watch::Receiver<bool>) {
    drop(stopped.wait_for(|stopped| *stopped).await);
}
