//! Curves of the last ten minutes.

use super::guests::name_of;
use super::history::{Counts, History, POINTS};
use super::html::{escaped, number, percent, seconds};

/// Guests that have a curve, at most: as many as there are colours.
pub(super) const MAX_SERIES: usize = 8;

/// Width and height of the curves in the units of the picture.
const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 120.0;

/// A figure over time.
struct Chart {
    id: &'static str,
    title: &'static str,
    figure: fn(&Counts) -> Option<f64>,
    /// Whether a part of the window with less than one graph needs those before it.
    is_of_graphs: bool,
    text: fn(f64) -> String,
}

const CHARTS: [Chart; 6] = [
    Chart {
        id: "tokens",
        title: "Tokens per second",
        figure: |counts| counts.rate(counts.tokens),
        is_of_graphs: false,
        text: number,
    },
    Chart {
        id: "graphs",
        title: "Graphs per second",
        figure: |counts| counts.rate(counts.graphs),
        is_of_graphs: false,
        text: number,
    },
    Chart {
        id: "time",
        title: "Share of the engine's time",
        // A turn counts when it ends, and may have begun before this part of the window.
        figure: |counts| counts.rate(counts.busy).map(|part| part.min(1.0)),
        is_of_graphs: false,
        text: percent,
    },
    Chart {
        id: "run",
        title: "Run time of a graph",
        figure: |counts| counts.each(counts.busy),
        is_of_graphs: true,
        text: seconds,
    },
    Chart {
        id: "queue",
        title: "Time of a graph in the queue",
        figure: |counts| counts.each(counts.queued),
        is_of_graphs: true,
        text: seconds,
    },
    Chart {
        id: "batch",
        title: "Graphs in a batch",
        figure: Counts::batch,
        is_of_graphs: false,
        text: number,
    },
];

/// The curve of a guest.
pub(super) struct Series<'a> {
    pub(super) guest: &'a str,
    curve: Vec<Option<Counts>>,
}

/// The curves of the guests that have used the engine most, in the order of `guests`.
pub(super) fn series<'a>(guests: &[&'a str], history: &History) -> Vec<Series<'a>> {
    let all = guests.iter().map(|&guest| Series {
        guest,
        curve: history.curve(guest),
    });
    let mut all: Vec<(usize, Series<'a>)> = all.enumerate().collect();
    let busy = |series: &Series<'_>| -> f64 {
        let parts = series.curve.iter().flatten();
        parts.map(|counts| counts.busy).sum()
    };
    all.sort_by(|(_, a), (_, b)| busy(b).total_cmp(&busy(a)));
    all.truncate(MAX_SERIES);
    all.sort_by_key(|(place, _)| *place);
    all.into_iter().map(|(_, series)| series).collect()
}

/// All charts. The curve of series `i` has colour `i + 1`.
pub(super) fn charts(series: &[Series<'_>]) -> String {
    let charts = CHARTS.iter().map(|chart| one(chart, series));
    format!("<div class=\"charts\">{}</div>", charts.collect::<String>())
}

fn one(chart: &Chart, series: &[Series<'_>]) -> String {
    let values = series.iter().map(|one| {
        let values = (0..one.curve.len()).map(|at| chart_value(chart, &one.curve[..=at]));
        values.collect::<Vec<Option<f64>>>()
    });
    let values: Vec<Vec<Option<f64>>> = values.collect();
    let most = values.iter().flatten().flatten().copied();
    let most = most.fold(0.0, f64::max);
    let mut lines = String::new();
    let mut said = Vec::new();
    for (i, (one, values)) in series.iter().zip(&values).enumerate() {
        for points in segments(values, most) {
            lines.push_str(&format!(
                "<polyline class=\"line s{}\" points=\"{points}\"></polyline>",
                i + 1
            ));
        }
        let known = || values.iter().flatten();
        if let Some(last) = known().next_back() {
            let highest = known().copied().fold(0.0, f64::max);
            said.push(format!(
                "{}: last {}, highest {}",
                name_of(one.guest),
                (chart.text)(*last),
                (chart.text)(highest)
            ));
        }
    }
    let said = match said.is_empty() {
        true => "nothing yet".to_owned(),
        false => said.join("; "),
    };
    let Chart {
        id, title, text, ..
    } = chart;
    let label = escaped(&format!("{title} in the last ten minutes. {said}"));
    let (title, most) = (escaped(title), escaped(&text(most)));
    format!(
        "<figure id=\"chart-{id}\" aria-labelledby=\"title-{id}\">\
         <figcaption id=\"title-{id}\">{title}</figcaption>\
         <span class=\"most\">{most}</span>\
         <svg class=\"chart\" role=\"img\" aria-label=\"{label}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\">\
         <path class=\"grid\" d=\"M0 1H{WIDTH}M0 {half}H{WIDTH}M0 {low}H{WIDTH}\"></path>\
         {lines}</svg>\
         <span class=\"axis\"><span>10 minutes ago</span><span>now</span></span></figure>",
        half = HEIGHT / 2.0,
        low = HEIGHT - 1.0,
    )
}

/// The figure of the last part of a curve. For a figure of each graph, a part in which less than
/// one has ended is taken together with those before it, until there is one.
fn chart_value(chart: &Chart, parts: &[Option<Counts>]) -> Option<f64> {
    let (last, before) = parts.split_last()?;
    let mut counts = (*last)?;
    if chart.is_of_graphs && counts.graphs > 0.0 {
        let mut before = before.iter().rev();
        while counts.graphs < 1.0
            && let Some(Some(part)) = before.next()
        {
            counts = counts.and(part);
        }
    }
    (chart.figure)(&counts)
}

/// The points of each unbroken part of a curve whose highest value is `most`.
fn segments(values: &[Option<f64>], most: f64) -> Vec<String> {
    let step = WIDTH / (POINTS - 1) as f64;
    let top = |value: f64| match most > 0.0 {
        true => HEIGHT - 2.0 - (HEIGHT - 4.0) * value / most,
        false => HEIGHT - 2.0,
    };
    let mut segments: Vec<String> = Vec::new();
    let mut is_open = false;
    for (i, value) in values.iter().enumerate() {
        let Some(value) = value else {
            is_open = false;
            continue;
        };
        let point = format!("{:.0},{:.1}", i as f64 * step, top(*value));
        match (is_open, segments.last_mut()) {
            (true, Some(segment)) => {
                segment.push(' ');
                segment.push_str(&point);
            }
            // A line of no length shows a point that is alone.
            _ => segments.push(format!("{point} {point}")),
        }
        is_open = true;
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A graph of 8 s whose end lies between two parts of the window, most of it in the second.
    #[test]
    fn a_small_part_of_a_graph_does_not_take_the_time_of_a_whole_one() {
        let part = |graphs: f64, busy: f64| {
            Some(Counts {
                seconds: 4.0,
                graphs,
                busy,
                ..Counts::default()
            })
        };
        let [rate, run] = ["graphs", "run"].map(|id| {
            let chart = CHARTS.iter().find(|chart| chart.id == id);
            chart.expect("a chart")
        });
        let curve = [None, part(0.0, 4.0), part(0.01, 3.96), part(0.99, 0.04)];
        assert_eq!(chart_value(rate, &curve), Some(0.99 / 4.0));
        assert_eq!(chart_value(run, &curve), Some(4.0));
        assert_eq!(chart_value(run, &curve[..3]), None, "no graph has ended");
        assert_eq!(chart_value(run, &curve[..2]), None);
        assert_eq!(chart_value(run, &[part(2.0, 1.0)]), Some(0.5));
    }

    #[test]
    fn a_curve_is_broken_where_nothing_is_known() {
        let mut values = vec![None; POINTS];
        values[0] = Some(0.0);
        values[1] = Some(2.0);
        values[POINTS - 1] = Some(1.0);
        let found = segments(&values, 2.0);
        assert_eq!(found, ["0,118.0 0,118.0 4,2.0", "600,60.0 600,60.0"]);
    }
}
