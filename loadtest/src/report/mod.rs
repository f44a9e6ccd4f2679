//! What a scenario found, as values: rows of the budget, text, tables, plots.
//!
//! Measures nothing. Files are written by its parts.

pub mod budget;
mod machine;
pub mod plot;
mod write;

pub use budget::{Budget, Unit};
pub use machine::{Machine, commit};
pub use plot::{Axis, Plot, Scale, Series};
pub use write::{Context, Report, Run};

use hdrhistogram::Histogram;

/// Percentiles that tables show.
pub const QUANTILES: [(&str, f64); 4] =
    [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];

/// What one scenario found. Only made of runs that passed the gate.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Rows of the budget that it measured.
    pub rows: Vec<Row>,
    /// Its page of the report, from top to bottom.
    pub blocks: Vec<Block>,
}

/// A measured row of the budget.
#[derive(Clone, Debug)]
pub struct Row {
    /// Which.
    pub budget: &'static Budget,
    /// In the budget's unit; events a second where that is a multiple of the control, which is not finished before the run is.
    pub value: f64,
    /// How large or how long what was measured was, where the budget says so.
    pub size: Option<Size>,
}

/// How large or how long what was measured was.
#[derive(Clone, Debug)]
pub struct Size {
    /// For people, such as `1,000,000 events`.
    pub is: String,
    /// Whether it is what the budget is about. If not, the value says nothing of whether the budget is met.
    pub is_full: bool,
}

/// A part of a page.
#[derive(Clone, Debug)]
pub enum Block {
    /// A paragraph of Markdown.
    Text(String),
    /// A table.
    Table(Table),
    /// A plot, in a file of its own.
    Plot(Plot),
}

/// A table with a heading.
#[derive(Clone, Debug)]
pub struct Table {
    /// Names of the columns.
    pub head: Vec<String>,
    /// Its rows, each as long as the heading.
    pub rows: Vec<Vec<Cell>>,
}

/// A cell of a table.
#[derive(Clone, Debug)]
pub enum Cell {
    /// As it is.
    Text(String),
    /// Events a second, shown beside how many times the control's they are.
    Rate(f64),
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Cell::Text(text)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Cell::Text(text.to_owned())
    }
}

impl From<u64> for Cell {
    fn from(count: u64) -> Self {
        Cell::Text(grouped(count))
    }
}

impl Findings {
    /// Adds a row of the budget.
    pub fn row(&mut self, budget: &'static Budget, value: f64) {
        self.rows.push(Row {
            budget,
            value,
            size: None,
        });
    }

    /// Adds a row of the budget that is about a size.
    pub fn sized_row(&mut self, budget: &'static Budget, value: f64, size: Size) {
        self.rows.push(Row {
            budget,
            value,
            size: Some(size),
        });
    }

    /// Adds a paragraph.
    pub fn text(&mut self, text: impl Into<String>) {
        self.blocks.push(Block::Text(text.into()));
    }

    /// Adds a table.
    pub fn table<const N: usize>(&mut self, head: [&str; N], rows: Vec<[Cell; N]>) {
        self.blocks.push(Block::Table(Table {
            head: head.map(str::to_owned).to_vec(),
            rows: rows.into_iter().map(Vec::from).collect(),
        }));
    }

    /// Adds a table of loads: the name of each, its events a second, and a histogram of microseconds.
    pub fn loads<'a>(&mut self, loads: impl Iterator<Item = (&'a str, f64, &'a Histogram<u64>)>) {
        let line = |(name, rate, latency_us): (&str, f64, &Histogram<u64>)| {
            let [p50, p90, p99, p999, max] = percentiles(latency_us);
            [name.into(), Cell::Rate(rate), p50, p90, p99, p999, max]
        };
        self.table(
            [
                "load", "events/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms",
            ],
            loads.map(line).collect(),
        );
    }

    /// Adds a plot.
    pub fn plot(&mut self, plot: Plot) {
        self.blocks.push(Block::Plot(plot));
    }
}

/// A quantile of a histogram of microseconds, in milliseconds.
pub fn quantile_ms(latency_us: &Histogram<u64>, quantile: f64) -> f64 {
    latency_us.value_at_quantile(quantile) as f64 / 1_000.0
}

/// Milliseconds as a table shows them.
pub fn millis(ms: f64) -> Cell {
    Cell::Text(format!("{ms:.2}"))
}

/// The percentiles of a histogram of microseconds and its maximum, as a table shows them in milliseconds.
pub fn percentiles(latency_us: &Histogram<u64>) -> [Cell; 5] {
    let [p50, p90, p99, p999] = QUANTILES.map(|(_, at)| millis(quantile_ms(latency_us, at)));
    [
        p50,
        p90,
        p99,
        p999,
        millis(latency_us.max() as f64 / 1_000.0),
    ]
}

/// A whole number with a comma between thousands.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The middle one, the upper of two; None of nothing.
pub fn median(values: impl IntoIterator<Item = u64>) -> Option<u64> {
    let mut values: Vec<u64> = values.into_iter().collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

/// Bytes as mebibytes with one place.
pub fn in_mebibytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// The same for a table.
pub fn mebibytes(bytes: u64) -> Cell {
    Cell::Text(in_mebibytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_told_apart() {
        let shown = [0, 7, 999, 1_000, 12_345, 1_234_567].map(grouped);
        assert_eq!(shown, ["0", "7", "999", "1,000", "12,345", "1,234,567"]);
    }

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(median([3, 1, 2]), Some(2));
        assert_eq!(median([2, 1]), Some(2));
        assert_eq!(median([]), None);
    }

    #[test]
    fn percentiles_come_in_milliseconds() {
        let mut latency_us = Histogram::<u64>::new_with_bounds(1, 120_000_000, 3).unwrap();
        for us in 1..=1_000_u64 {
            latency_us.record(us * 100).unwrap();
        }
        let shown = percentiles(&latency_us).map(|cell| match cell {
            Cell::Text(text) => text,
            Cell::Rate(rate) => panic!("{rate}"),
        });
        // Three digits are kept, so the highest value of the bucket stands for all in it.
        assert_eq!(shown, ["50.02", "90.05", "99.01", "99.90", "100.03"]);
    }
}
