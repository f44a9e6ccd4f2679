//! Outcomes: what the publisher does about confirmed, returned, refused messages and closed channels.
//!
//! Never counts a try of a message that was not alone in flight, and never parks one for a fault that may be the operator's.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use lapin::types::ShortString;
use tokio_postgres::Client;

use super::book::REFUSED_PAUSE;
use super::broker::{BrokerError, Closed};
use super::pattern;
use super::publish::{Fault, Publisher, Session, count, within};
use super::verdict::Verdict;
use crate::store::outbox::{self, Waiting};

/// Refusals of a message alone in flight, before it is parked.
const TRIES_MAX: i32 = 5;
/// Pause of a message that closes channels for a reason that may be the operator's.
const RULE_PAUSE: Duration = Duration::from_secs(30);

impl Publisher {
    /// Acts on the confirms that have come.
    pub(super) async fn settle(&mut self, session: &mut Session) -> Result<(), Fault> {
        let confirmed = std::mem::take(&mut self.confirmed);
        if confirmed.is_empty() {
            return Ok(());
        }
        let pending = session.broker.pending();
        let metrics = Arc::clone(&self.settings.metrics);
        let (mut done, mut held, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for (id, verdict) in self.verdicts.take(confirmed, pending) {
            let (Some(flight), Some(row)) = (self.flying.remove(&id), self.book.settle(id)) else {
                continue;
            };
            self.bytes_out -= flight.bytes;
            match verdict {
                Verdict::Delivered => {
                    count(&metrics, "confirmed", 1);
                    done.push(row);
                }
                Verdict::Returned => {
                    count(&metrics, "returned", 1);
                    let required = &self.settings.config.required;
                    if required
                        .iter()
                        .any(|pattern| pattern::matches(pattern, flight.routing_key.as_str()))
                    {
                        held.push((row, flight.routing_key));
                    } else {
                        // Nobody has subscribed, and nobody has to.
                        done.push(row);
                    }
                }
                Verdict::Refused => {
                    count(&metrics, "refused", 1);
                    refused.push(row);
                }
            }
        }
        self.delete(&session.client, &done).await?;
        self.hold(&session.client, held).await?;
        self.put_off(&session.client, &refused, REFUSED_PAUSE).await
    }

    async fn delete(&mut self, client: &Client, done: &[Waiting]) -> Result<(), Fault> {
        if done.is_empty() {
            return Ok(());
        }
        self.backoff.reset();
        let deleted = within(outbox::delete(client, done)).await?;
        let deleted = usize::try_from(deleted).unwrap_or(0);
        count(&self.settings.metrics, "deleted", deleted);
        for row in done {
            if deleted == done.len() {
                self.book.gone(row);
            } else {
                self.book.moved(row);
            }
        }
        Ok(())
    }

    /// Events that nobody has bound a queue for, but somebody has to.
    async fn hold(
        &mut self,
        client: &Client,
        rows: Vec<(Waiting, ShortString)>,
    ) -> Result<(), Fault> {
        if rows.is_empty() {
            return Ok(());
        }
        let hold_for = Duration::from_secs(self.settings.config.hold_for_s);
        let (rows, routing_keys): (Vec<Waiting>, Vec<ShortString>) = rows.into_iter().unzip();
        let held: HashMap<i64, Duration> = within(outbox::hold(client, &rows, hold_for))
            .await?
            .into_iter()
            .map(|held| (held.position, held.held))
            .collect();
        for (row, routing_key) in rows.into_iter().zip(routing_keys) {
            match held.get(&row.position) {
                None => self.book.moved(&row),
                Some(held) if *held >= hold_for => self.park(client, &row, "unroutable").await?,
                Some(held) => {
                    if *held < REFUSED_PAUSE {
                        tracing::warn!(
                            position = row.position,
                            routing_key = routing_key.as_str(),
                            "no queue is bound for this event: its user is held back"
                        );
                    }
                    self.book.hold(row.user_no);
                }
            }
        }
        Ok(())
    }

    async fn put_off(
        &mut self,
        client: &Client,
        rows: &[Waiting],
        pause: Duration,
    ) -> Result<(), Fault> {
        if rows.is_empty() {
            return Ok(());
        }
        let postponed = within(outbox::postpone(client, rows, false, pause)).await?;
        for row in rows {
            if postponed
                .iter()
                .any(|(position, _)| *position == row.position)
            {
                self.book.hold(row.user_no);
            } else {
                self.book.moved(row);
            }
        }
        Ok(())
    }

    /// Takes an event out of the way, with its bytes and the reason; its user flows on.
    pub(super) async fn park(
        &mut self,
        client: &Client,
        row: &Waiting,
        reason: &str,
    ) -> Result<(), Fault> {
        if within(outbox::park(client, row.position, reason)).await? {
            tracing::warn!(position = row.position, reason, "an event is parked");
            count(&self.settings.metrics, "parked", 1);
        }
        self.book.gone(row);
        Ok(())
    }

    /// A call on the channel failed. When the broker closed it over a message, finds out which one by publishing what was out one by
    /// one on a fresh channel.
    ///
    /// # Errors
    /// When the failure says nothing about messages, or the connection is gone as well.
    pub(super) async fn broker_failed(
        &mut self,
        session: &mut Session,
        error: BrokerError,
    ) -> Result<(), Fault> {
        let error = session.broker.cause(error, &mut self.confirmed).await;
        let closed = error.closed();
        // What was confirmed before is settled; returns that did not come with it never will, and then it is not certain.
        let outcome = self.settle_before_loss(session).await;
        if closed == Closed::Otherwise {
            return Err(error.into());
        }
        outcome?;
        self.forget_flights();
        if let Some(row) = self.book.channel_closed() {
            self.refused_alone(&session.client, &row, closed, &error)
                .await?;
        } else {
            tracing::warn!(%error, "the broker closed the channel over one of several messages: they go one by one");
        }
        session.broker.reopen().await?;
        Ok(())
    }

    async fn settle_before_loss(&mut self, session: &mut Session) -> Result<(), Fault> {
        // Confirms that will never come are outstanding all the same: nothing may be taken for the last one.
        let lost = session.broker.pending().max(1);
        let confirmed = std::mem::take(&mut self.confirmed);
        let certain = self.verdicts.take(confirmed, lost);
        let mut done = Vec::new();
        for (id, verdict) in certain {
            if verdict == Verdict::Delivered
                && let (Some(flight), Some(row)) = (self.flying.remove(&id), self.book.settle(id))
            {
                self.bytes_out -= flight.bytes;
                count(&self.settings.metrics, "confirmed", 1);
                done.push(row);
            }
        }
        self.delete(&session.client, &done).await
    }

    async fn refused_alone(
        &mut self,
        client: &Client,
        row: &Waiting,
        closed: Closed,
        error: &BrokerError,
    ) -> Result<(), Fault> {
        count(&self.settings.metrics, "refused", 1);
        if closed == Closed::ByRule {
            tracing::warn!(position = row.position, %error, "the broker refuses an event by a rule of its own");
            return self
                .put_off(client, std::slice::from_ref(row), RULE_PAUSE)
                .await;
        }
        let tried = within(outbox::postpone(
            client,
            std::slice::from_ref(row),
            true,
            REFUSED_PAUSE,
        ))
        .await?;
        match tried.first() {
            Some((_, tries)) if *tries >= TRIES_MAX => {
                self.park(client, row, &error.to_string()).await
            }
            Some(_) => {
                self.book.hold(row.user_no);
                Ok(())
            }
            None => {
                self.book.moved(row);
                Ok(())
            }
        }
    }
}
