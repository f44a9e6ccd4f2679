//! Plots as SVG files.
//!
//! Draws what it is given: no smoothing, no axis that does not begin where its numbers do.

use anyhow::{Context, Result, anyhow};
use hdrhistogram::Histogram;
use plotters::prelude::*;
use std::path::Path;

const SIZE: (u32, u32) = (860, 420);
const LABELS: usize = 8;
/// Told apart by people who see colours in other ways, too.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
];

/// A plot of lines.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Name of its file, without an ending.
    pub file: String,
    /// What it shows.
    pub title: String,
    /// To the right.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
    /// Its lines.
    pub series: Vec<Series>,
}

/// An axis.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// What it measures, and in what.
    pub label: &'static str,
    /// How values are spread along it.
    pub scale: Scale,
}

/// How values are spread along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Evenly, from zero.
    Linear,
    /// Each doubling takes the same space.
    Log2,
    /// Each tenfold takes the same space.
    Log10,
    /// Percentiles: each further nine takes the same space.
    Nines,
}

/// A line.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points.
    pub points: Vec<(f64, f64)>,
}

impl Scale {
    /// Where a value lies; None where the scale has no place for it.
    fn place(self, value: f64) -> Option<f64> {
        let at = match self {
            Scale::Linear => value,
            Scale::Log2 => value.log2(),
            Scale::Log10 => value.log10(),
            Scale::Nines => -(1.0 - value / 100.0).log10(),
        };
        at.is_finite().then_some(at)
    }

    fn label(self, place: f64) -> String {
        let value = match self {
            Scale::Linear => place,
            Scale::Log2 => place.exp2(),
            Scale::Log10 => 10_f64.powf(place),
            Scale::Nines => 100.0 * (1.0 - 10_f64.powf(-place)),
        };
        let digits = match (self, value.abs()) {
            (Scale::Nines, _) => return format!("{}", (value * 1e4).round() / 1e4),
            (_, size) if size >= 10.0 || size == 0.0 => 0,
            (_, size) if size >= 1.0 => 1,
            _ => 2,
        };
        format!("{value:.digits$}")
    }
}

/// Latencies by percentile, each a name and a histogram of microseconds.
pub fn percentiles<'a>(
    file: &str,
    title: &str,
    latencies: impl IntoIterator<Item = (&'a str, &'a Histogram<u64>)>,
) -> Plot {
    Plot {
        file: file.to_owned(),
        title: title.to_owned(),
        x: Axis {
            label: "percentile",
            scale: Scale::Nines,
        },
        y: Axis {
            label: "ms",
            scale: Scale::Log10,
        },
        series: latencies
            .into_iter()
            .map(|(name, latency_us)| by_percentile(name, latency_us))
            .collect(),
    }
}

/// Latency at each percentile up to the last that a histogram can tell, in milliseconds.
fn by_percentile(name: &str, latency_us: &Histogram<u64>) -> Series {
    let mut points = Vec::new();
    let mut step = 0_u32;
    loop {
        // Ten points for each further nine.
        let share = 1.0 - 10_f64.powf(-f64::from(step) / 10.0);
        if latency_us.len() as f64 * (1.0 - share) < 1.0 {
            break;
        }
        let ms = latency_us.value_at_quantile(share) as f64 / 1_000.0;
        points.push((100.0 * share, ms));
        step += 1;
    }
    Series {
        name: name.to_owned(),
        points,
    }
}

impl Plot {
    /// Writes the file into a directory.
    ///
    /// # Errors
    /// When there is nothing to draw or nowhere to write it.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let path = dir.join(format!("{}.svg", self.file));
        let mut text = String::new();
        self.draw(&mut text)
            .with_context(|| format!("plot {}", self.file))?;
        std::fs::write(&path, text).with_context(|| path.display().to_string())
    }

    fn draw(&self, into: &mut String) -> Result<()> {
        let lines: Vec<(&str, Vec<(f64, f64)>)> = self
            .series
            .iter()
            .map(|series| (series.name.as_str(), self.places(series)))
            .collect();
        let all: Vec<(f64, f64)> = lines
            .iter()
            .flat_map(|(_, points)| points.clone())
            .collect();
        let (x, y) = bounds(self.x.scale, all.iter().map(|point| point.0))
            .zip(bounds(self.y.scale, all.iter().map(|point| point.1)))
            .context("there is nothing to draw")?;
        let area = SVGBackend::with_string(into, SIZE).into_drawing_area();
        let failed = |error: String| anyhow!("{error}");
        area.fill(&WHITE).map_err(|e| failed(e.to_string()))?;
        let mut chart = ChartBuilder::on(&area)
            .caption(&self.title, ("sans-serif", 17))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(64)
            .build_cartesian_2d(x.0..x.1, y.0..y.1)
            .map_err(|e| failed(e.to_string()))?;
        chart
            .configure_mesh()
            .x_desc(self.x.label)
            .y_desc(self.y.label)
            .x_labels(LABELS)
            .y_labels(LABELS)
            .x_label_formatter(&|place| self.x.scale.label(*place))
            .y_label_formatter(&|place| self.y.scale.label(*place))
            .light_line_style(TRANSPARENT)
            .draw()
            .map_err(|e| failed(e.to_string()))?;
        for ((name, points), colour) in lines.into_iter().zip(COLOURS.iter().cycle()) {
            chart
                .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))
                .map_err(|e| failed(e.to_string()))?
                .label(name)
                .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .draw()
            .map_err(|e| failed(e.to_string()))?;
        area.present().map_err(|e| failed(e.to_string()))?;
        Ok(())
    }

    fn places(&self, series: &Series) -> Vec<(f64, f64)> {
        series
            .points
            .iter()
            .filter_map(|(x, y)| self.x.scale.place(*x).zip(self.y.scale.place(*y)))
            .collect()
    }
}

/// From the least to the greatest, with some air; an even scale begins at zero.
fn bounds(scale: Scale, places: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let (least, most) = places.fold(None, |bounds: Option<(f64, f64)>, place| {
        let (least, most) = bounds.unwrap_or((place, place));
        Some((least.min(place), most.max(place)))
    })?;
    let least = if scale == Scale::Linear {
        least.min(0.0)
    } else {
        least
    };
    let air = if most > least {
        (most - least) * 0.05
    } else {
        0.5
    };
    Some((least, most + air))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>) -> Plot {
        Plot {
            file: "a-plot".to_owned(),
            title: "Throughput by requests in flight".to_owned(),
            x: Axis {
                label: "in flight",
                scale: Scale::Log2,
            },
            y: Axis {
                label: "events/s",
                scale: Scale::Linear,
            },
            series: vec![Series {
                name: "relay paused".to_owned(),
                points,
            }],
        }
    }

    #[test]
    fn a_plot_is_a_file_with_its_words() {
        let dir = std::env::temp_dir().join(format!("daybook-plot-{:016x}", rand::random::<u64>()));
        std::fs::create_dir(&dir).unwrap();
        plot(vec![(1.0, 900.0), (2.0, 1_700.0), (1_024.0, 8_000.0)])
            .write(&dir)
            .unwrap();
        let svg = std::fs::read_to_string(dir.join("a-plot.svg")).unwrap();
        for word in [
            "<svg",
            "Throughput by requests in flight",
            "relay paused",
            "events/s",
        ] {
            assert!(svg.contains(word), "{word}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn nothing_draws_nothing() {
        for points in [vec![], vec![(0.0, 1.0)], vec![(1.0, f64::NAN)]] {
            assert!(plot(points).draw(&mut String::new()).is_err());
        }
    }

    #[test]
    fn labels_say_the_value_and_not_its_place() {
        for (scale, value, label) in [
            (Scale::Linear, 2_500.0, "2500"),
            (Scale::Log2, 256.0, "256"),
            (Scale::Log10, 0.05, "0.05"),
            (Scale::Nines, 99.9, "99.9"),
            (Scale::Nines, 0.0, "0"),
        ] {
            assert_eq!(scale.label(scale.place(value).unwrap()), label);
        }
        assert_eq!(Scale::Nines.place(100.0), None);
        assert_eq!(Scale::Log2.place(0.0), None);
    }

    #[test]
    fn a_histogram_is_drawn_as_far_as_it_can_tell() {
        let mut latency_us = Histogram::<u64>::new_with_bounds(1, 1_000_000, 3).unwrap();
        for us in 1..=1_000_u64 {
            latency_us.record(us).unwrap();
        }
        let line = by_percentile("all", &latency_us);
        assert_eq!(line.points.first().unwrap().0, 0.0);
        let (last, ms) = *line.points.last().unwrap();
        assert!(last <= 99.9 + 1e-9 && last > 99.0, "{last}");
        assert!(ms > 0.98, "{ms}");
    }
}
