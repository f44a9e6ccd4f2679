//! Daybook's command line: reads arguments and configuration, and hands over.

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use daybook::config::Config;
use daybook::domain::{Scope, Subject};
use daybook::keeper::verify;
use daybook::relay::{self, Received, Source};
use daybook::service::{Listeners, Roles, Service};
use daybook::store::{bootstrap, migrate, outbox, session, tail};
use daybook::{auth, dev, shutdown, telemetry};
use indicatif::{ProgressBar, ProgressStyle};
use secrecy::{ExposeSecret, SecretString};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::TcpListener;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The directory of a checkout's development ledger.
const DEV_DIR: &str = ".daybook";

/// A self-hosted, event-sourced money ledger.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    /// TOML file with settings; the environment (`DAYBOOK_*`) goes before it.
    #[arg(long, global = true)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve: the API, the relay and the keeper, or some of them.
    Serve {
        /// Comma-separated: api, relay, keeper.
        #[arg(long, default_value = "api,relay,keeper")]
        roles: Roles,
    },
    /// Bring the database to this version and give the runtime role its rights.
    Migrate,
    /// Run a private Postgres, RabbitMQ and server, for trying things out.
    Dev {
        /// Where its data and `env` live.
        #[arg(long, default_value = DEV_DIR, global = true)]
        dir: PathBuf,
        #[command(subcommand)]
        action: Option<DevAction>,
    },
    /// Issue a development token, signed with an HS256 key of the keys file.
    Token {
        /// Whose token it is.
        #[arg(long)]
        subject: String,
        /// Scopes, separated by commas: ledger:read, ledger:write, ledger:read:any, ledger:write:any, ledger:admin.
        #[arg(
            long,
            value_delimiter = ',',
            default_value = "ledger:read,ledger:write"
        )]
        scope: Vec<String>,
        /// How long it lives, in seconds.
        #[arg(long, default_value_t = 3_600)]
        ttl_s: u64,
    },
    /// Look at events.
    Events {
        #[command(subcommand)]
        action: EventsAction,
    },
    /// Look at the outbox.
    Outbox {
        #[command(subcommand)]
        action: OutboxAction,
    },
    /// Read every record again and prove that all tables agree. Exit code 1 when they do not.
    Verify,
    /// Run a command with private services for tests and measurements.
    #[command(hide = true)]
    Services {
        #[command(subcommand)]
        action: ServicesAction,
    },
}

#[derive(Subcommand)]
enum DevAction {
    /// Stop or start the broker of a running `daybook dev`.
    Broker {
        /// What to do with it.
        #[arg(value_parser = ["stop", "start"])]
        what: String,
    },
}

#[derive(Subcommand)]
enum EventsAction {
    /// Show records as they settle, from now on, one line each, until interrupted; with --broker, messages.
    Tail(TailArgs),
}

#[derive(Args)]
struct TailArgs {
    /// Show messages of RabbitMQ instead of rows of the database.
    #[arg(long)]
    broker: bool,
    /// With --broker: a queue whose messages are shown and left where they are; the demo queue of `daybook dev` when one runs
    /// here. Else new messages only.
    #[arg(long)]
    queue: Option<String>,
}

#[derive(Subcommand)]
enum OutboxAction {
    /// What waits, what is held, what is parked.
    List,
}

#[derive(Subcommand)]
enum ServicesAction {
    /// Start them, run the command with their addresses in its environment, stop them.
    Run {
        /// Where their data lives while it runs.
        #[arg(long, default_value = ".daybook/test")]
        dir: PathBuf,
        /// Services that survive a power cut, as in production: what is measured on others compares with nothing.
        #[arg(long)]
        durable: bool,
        /// Count what each statement costs (`pg_stat_statements`).
        #[arg(long)]
        statement_statistics: bool,
        /// The command and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(run(cli)));
    match outcome {
        Ok(code) => code,
        Err(error) => {
            // Nobody may be reading.
            let _ = writeln!(std::io::stderr(), "daybook: {}", told(&error));
            ExitCode::FAILURE
        }
    }
}

/// The error and its causes in one line. Libraries repeat a cause in the text of what it caused; it is said once.
fn told(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |said, cause| {
        let cause = cause.to_string();
        match said.as_str() {
            "" => cause,
            _ if said.contains(&cause) => said,
            _ => format!("{said}: {cause}"),
        }
    })
}

async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let file = cli.config.as_deref();
    match cli.command {
        Command::Serve { roles } => serve(Config::load(file)?, roles).await?,
        Command::Migrate => apply(&Config::load(file)?).await?,
        Command::Dev { dir, action: None } => dev::dev(&dir, develop).await?,
        Command::Dev {
            dir,
            action: Some(DevAction::Broker { what }),
        } => match what.as_str() {
            "stop" => {
                dev::broker_stop(&dir)?;
                say("RabbitMQ is stopped; events are accepted and wait in the outbox")?;
            }
            _ => {
                dev::broker_start(&dir)?;
                say("RabbitMQ is running; what waited is published within seconds")?;
            }
        },
        Command::Token {
            subject,
            scope,
            ttl_s,
        } => token(&tool_config(file)?.0, &subject, &scope, ttl_s)?,
        Command::Events {
            action: EventsAction::Tail(args),
        } => {
            let (config, queue) = tool_config(file)?;
            events_tail(&config, args, queue).await?;
        }
        Command::Outbox {
            action: OutboxAction::List,
        } => outbox_list(&tool_config(file)?.0).await?,
        Command::Verify => return prove(&tool_config(file)?.0).await,
        Command::Services {
            action:
                ServicesAction::Run {
                    dir,
                    durable,
                    statement_statistics,
                    command,
                },
        } => {
            let kind = dev::Kind {
                unsafe_but_fast: !durable,
                statement_statistics,
            };
            return Ok(ExitCode::from(
                dev::run_with_services(&dir, kind, &command).await?,
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn serve(config: Config, roles: Roles) -> anyhow::Result<()> {
    let _log = telemetry::log(&config).map_err(anyhow::Error::msg)?;
    let stopped = shutdown::signals()?;
    let listeners = Listeners::bind(&config, roles).await?;
    let service = Service::start(config, roles, listeners).await?;
    tracing::info!(api = ?service.api_addr, ops = %service.ops_addr, ?roles, "serving");
    shutdown::wait(stopped).await;
    service.stop().await;
    Ok(())
}

async fn apply(config: &Config) -> anyhow::Result<()> {
    let owner = config
        .owner_database_url
        .as_ref()
        .context("DAYBOOK_OWNER_DATABASE_URL is not set")?;
    let applied = migrate::migrate(owner, &config.database_url, &config.ledger).await?;
    say(&format!(
        "{applied} migrations applied; the schema is at version {}",
        migrate::version()
    ))
}

/// The configuration of a command for people: that of the development ledger of this directory, when one runs here and the
/// environment names no database. With it the name of the demo queue, if there is one.
fn tool_config(file: Option<&Path>) -> anyhow::Result<(Config, Option<String>)> {
    let mut config = Config::load(file)?;
    let dir = Path::new(DEV_DIR);
    let elsewhere = !config.database_url.expose_secret().is_empty();
    let Some(running) = dev::Session::read(dir).filter(|_| !elsewhere) else {
        return Ok((config, None));
    };
    config.database_url = running.database_url.into();
    config.amqp_url = running.amqp_url.into();
    config.keys_file.get_or_insert(dir.join("keys.json"));
    Ok((config, Some(running.demo_queue)))
}

/// The database of a command for people.
fn database(config: &Config) -> anyhow::Result<&SecretString> {
    if config.database_url.expose_secret().is_empty() {
        bail!(
            "no ledger: run it in the directory where `make run` is running, or set DAYBOOK_DATABASE_URL"
        );
    }
    Ok(&config.database_url)
}

fn say(line: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        // The reader has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => Ok(other?),
    }
}

/// The server of `daybook dev`.
async fn develop(ready: dev::Ready) -> anyhow::Result<()> {
    let keys = ready.dir.join("keys.json");
    if !keys.exists() {
        auth::generate_dev_keys(&keys)?;
    }
    let password = format!("{:032x}", rand::random::<u128>());
    let superuser: SecretString = ready.database_url.clone().into();
    let urls = bootstrap::bootstrap(&superuser, "daybook", &password).await?;
    let config = Config {
        database_url: urls.runtime.clone(),
        amqp_url: ready.amqp_url.clone().into(),
        keys_file: Some(keys.clone()),
        log: "warn,lapin=off".to_owned(),
        ..Config::default()
    };
    let _log = telemetry::log(&config).map_err(anyhow::Error::msg)?;
    migrate::migrate(&urls.owner, &urls.runtime, &config.ledger).await?;
    let queue = format!("daybook.{}.demo", config.ledger);
    relay::declare_queue(&config.amqp_url, &config.ledger, &queue, "#").await?;
    let listeners = Listeners {
        api: Some(near(8080).await?),
        ops: near(9090).await?,
    };
    let owner = format!(
        "{}?options=-csearch_path%3D{}",
        urls.owner.expose_secret(),
        config.ledger
    );
    let service = Service::start(config, Roles::ALL, listeners).await?;
    let admin = [
        Scope::Read,
        Scope::Write,
        Scope::ReadAny,
        Scope::WriteAny,
        Scope::Admin,
    ];
    let week = Duration::from_secs(7 * 24 * 3_600);
    let sign = |subject: &str, scopes: &[Scope]| {
        let subject = Subject::parse(subject).context("a subject")?;
        Ok::<_, anyhow::Error>(auth::issue(
            &keys,
            &subject,
            scopes,
            week,
            jiff::Timestamp::now(),
        )?)
    };
    let session = dev::Session {
        url: format!("http://{}", service.api_addr.context("the API listens")?),
        ops_url: format!("http://{}", service.ops_addr),
        token: sign("alice", &[Scope::Read, Scope::Write])?,
        admin_token: sign("admin", &admin)?,
        database_url: owner,
        amqp_url: ready.amqp_url.clone(),
        demo_queue: queue,
    };
    session.write(&ready.dir)?;
    say(&session.welcome(
        &std::env::args()
            .next()
            .unwrap_or_else(|| "daybook".to_owned()),
        &ready.dir,
    ))?;
    shutdown::wait(ready.stop).await;
    service.stop().await;
    Ok(())
}

/// This port of this machine, or any free one when somebody has it.
async fn near(port: u16) -> std::io::Result<TcpListener> {
    match TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await
        }
        other => other,
    }
}

fn token(config: &Config, subject: &str, scopes: &[String], ttl_s: u64) -> anyhow::Result<()> {
    let keys = config.keys_file.as_deref().context(
        "no keys: run it in the directory where `make run` is running, or set DAYBOOK_KEYS_FILE",
    )?;
    let subject =
        Subject::parse(subject).context("a subject is 1 to 128 visible ASCII characters")?;
    let scopes = scopes
        .iter()
        .map(|name| {
            Scope::parse(name)
                .with_context(|| format!("{name:?} is no scope; see `daybook token --help`"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    say(&auth::issue(
        keys,
        &subject,
        &scopes,
        Duration::from_secs(ttl_s),
        jiff::Timestamp::now(),
    )?)
}

async fn events_tail(
    config: &Config,
    args: TailArgs,
    demo_queue: Option<String>,
) -> anyhow::Result<()> {
    let stopped = shutdown::signals()?;
    let showing = async {
        if !args.broker {
            return rows(config).await;
        }
        let source = match args.queue.or(demo_queue) {
            Some(name) => Source::Queue {
                name,
                acknowledge: false,
            },
            None => Source::New {
                ledger: config.ledger.clone(),
                pattern: "#".to_owned(),
            },
        };
        Ok(relay::tail(&config.amqp_url, source, show).await?)
    };
    tokio::select! {
        shown = showing => shown,
        () = shutdown::wait(stopped) => Ok(()),
    }
}

fn show(message: Received) {
    let header = |name: &str| message.headers.get(name).map_or("-", String::as_str);
    let line = format!(
        "{} subject={} usersequence={} message_id={} sha256={}\n{}",
        message.routing_key,
        header("subject"),
        header("usersequence"),
        message.message_id,
        header("sha256"),
        String::from_utf8_lossy(&message.body)
    );
    if let Err(error) = say(&line) {
        tracing::warn!(%error, "standard output");
    }
}

/// Rows of the database, from now on, as the horizon settles them.
async fn rows(config: &Config) -> anyhow::Result<()> {
    let (client, _driver) =
        session::connect(database(config)?, &config.ledger, session::Purpose::Read).await?;
    let mut after = tail::latest(&client).await?;
    loop {
        let page = tail::after(&client, after).await?;
        for (position, record) in &page {
            say(record)?;
            after = *position;
        }
        if page.is_empty() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

async fn outbox_list(config: &Config) -> anyhow::Result<()> {
    let (client, _driver) =
        session::connect(database(config)?, &config.ledger, session::Purpose::Read).await?;
    let depth = outbox::depth(&client).await?;
    say(&format!(
        "waiting {}, the oldest for {:.1} s; parked {}",
        depth.waiting, depth.oldest_seconds, depth.parked
    ))?;
    for held in outbox::held(&client).await? {
        say(&format!(
            "held    {} events of type {} since {}",
            held.events, held.routing_key, held.since
        ))?;
    }
    let mut after = 0;
    loop {
        let parked = outbox::parked(&client, after, outbox::LIST_MAX).await?;
        let Some(last) = parked.last() else {
            return Ok(());
        };
        after = last.position;
        for event in parked {
            let id = event
                .event_id
                .map_or_else(|| "-".to_owned(), |id| id.to_string());
            let (kind, subject) = (
                event.event_type.unwrap_or_default(),
                event.subject.unwrap_or_default(),
            );
            say(&format!(
                "parked  {id} {kind} of {subject} at {}: {}",
                event.parked_at, event.reason
            ))?;
        }
    }
}

async fn prove(config: &Config) -> anyhow::Result<ExitCode> {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} events {per_sec} {eta}") {
        bar.set_style(style);
    }
    let report = verify::verify(database(config)?, &config.ledger, |read, total| {
        bar.set_length(total);
        bar.set_position(read);
    })
    .await?;
    bar.finish_and_clear();
    for fault in &report.faults {
        say(&format!("FAULT {fault}"))?;
    }
    say(&format!(
        "events {}, users {}, postings {}, balances {}: {}",
        report.events,
        report.users,
        report.postings,
        report.balances,
        if report.faults.is_empty() {
            "every hash, chain, posting and balance agrees"
        } else {
            "NOT IN ORDER"
        }
    ))?;
    Ok(if report.faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
