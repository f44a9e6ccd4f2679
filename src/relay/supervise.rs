//! Supervision: a task of the relay that panics is started anew, so that a process that looks healthy has a relay that works.
//!
//! Never starts one again that ended by itself, or after the stop.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::time::Instant;

use super::backoff::{Backoff, SOUND};
use super::stopped;

/// Runs what `start` makes, and makes it anew after a panic and a pause. `start` is called at once after the panic, so that it can
/// tell others; what it makes runs after the pause.
pub(super) async fn supervise<T: Future<Output = ()>>(
    name: &'static str,
    mut stop: watch::Receiver<bool>,
    start: impl Fn() -> T,
) {
    let mut backoff = Backoff::default();
    let mut task = start();
    loop {
        let began = Instant::now();
        // All that the task had is dropped with it; what it shares with others are channels, whose values are whole.
        let Err(panic) = AssertUnwindSafe(task).catch_unwind().await else {
            return;
        };
        task = start();
        if began.elapsed() > SOUND {
            backoff.reset();
        }
        let pause = backoff.next(rand::random());
        let reason = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("of unknown kind");
        tracing::error!(
            task = name,
            reason,
            pause_ms = pause.as_millis(),
            "a task of the relay panicked and is started anew"
        );
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stopped(&mut stop) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::time::Duration;

    #[tokio::test]
    async fn a_task_that_panics_is_started_anew_after_a_pause_until_it_ends() {
        let (_stop, stopped) = watch::channel(false);
        let (made, ran) = (Cell::new(0), Cell::new(0));
        let began = Instant::now();
        supervise("test", stopped, || {
            made.set(made.get() + 1);
            async {
                ran.set(ran.get() + 1);
                assert!(ran.get() > 1, "the first one dies");
            }
        })
        .await;
        assert_eq!((made.get(), ran.get()), (2, 2));
        assert!(began.elapsed() >= Duration::from_secs(1));
    }

    #[tokio::test]
    async fn none_is_started_anew_after_the_stop() {
        let (stop, stopped) = watch::channel(false);
        let ran = Cell::new(0);
        supervise("test", stopped, || async {
            ran.set(ran.get() + 1);
            stop.send_replace(true);
            panic!("at the stop");
        })
        .await;
        assert_eq!(ran.get(), 1);
    }
}
