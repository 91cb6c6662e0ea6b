//! A picture of a benchmark's figures, as SVG.
//!
//! Colours and greys are of middle brightness, and there is no background: the picture is readable
//! on white and on black.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, ensure};
use plotters::backend::SVGBackend;
use plotters::drawing::IntoDrawingArea as _;
use plotters::element::{Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color as _, IntoFont as _, RGBColor, TextStyle};
use serde_json::Value;
use xtask_common::println;
use xtask_common::workspace;

/// Options of the pictures.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Files of the benchmarks: target/bench/*.json
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The folder for the pictures, each named after its file [default: docs/img]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Only rows whose name contains one of these
    #[arg(long, value_name = "TEXT")]
    rows: Vec<String>,
}

/// The colour of text, readable on white and on black.
const GREY: RGBColor = RGBColor(122, 122, 122);
/// The colours of the configurations, repeated if there are more configurations.
const COLOURS: [RGBColor; 6] = [
    RGBColor(66, 133, 214),
    RGBColor(222, 125, 40),
    RGBColor(74, 160, 84),
    RGBColor(150, 100, 190),
    RGBColor(200, 80, 90),
    RGBColor(90, 150, 160),
];
const FONT: &str = "sans-serif";

// Lengths in pixels.
const WIDTH: i32 = 860;
const MARGIN: i32 = 16;
const BAR: i32 = 16;
const GAP: i32 = 14;
const LINE: i32 = 20;
const LABELS: i32 = 230;
const FIGURES: i32 = 90;

/// The figures of one measurement.
#[derive(Debug, PartialEq)]
struct Row {
    what: String,
    unit: String,
    /// The configurations with their figures, in order of their names.
    figures: BTreeMap<String, f64>,
}

/// Draws a picture for each file and prints its path.
pub(crate) fn run(options: &Options) -> Result<()> {
    let folder = match &options.out {
        Some(folder) => folder.clone(),
        None => workspace::root().join("docs/img"),
    };
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    for file in &options.files {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let rows = parse(&text, &options.rows)
            .with_context(|| format!("{} is no benchmark's file", file.display()))?;
        let name = file.file_stem().context("a file without a name")?;
        let picture = folder.join(Path::new(name).with_extension("svg"));
        std::fs::write(&picture, draw(&rows)?)
            .with_context(|| format!("writing {}", picture.display()))?;
        println!("{}", picture.display());
    }
    Ok(())
}

/// Reads the rows of a benchmark whose names contain one of `wanted`, or all.
fn parse(text: &str, wanted: &[String]) -> Result<Vec<Row>> {
    let value: Value = serde_json::from_str(text).context("parsing JSON")?;
    let mut rows = Vec::new();
    for row in value["rows"].as_array().context("it has no rows")? {
        let text = |name: &str| row[name].as_str().map(str::to_owned);
        let what = text("what").context("a row without a name")?;
        if !wanted.is_empty() && !wanted.iter().any(|part| what.contains(part.as_str())) {
            continue;
        }
        let figures = row["figures"]
            .as_object()
            .context("a row without figures")?;
        rows.push(Row {
            what,
            unit: text("unit").context("a row without a unit")?,
            figures: { figures.iter() }
                .filter_map(|(way, figure)| Some((way.clone(), figure.as_f64()?)))
                .filter(|(_, figure)| figure.is_finite() && *figure >= 0.0)
                .collect(),
        });
    }
    rows.retain(|row| !row.figures.is_empty());
    ensure!(!rows.is_empty(), "none of its rows is wanted");
    Ok(rows)
}

/// Draws the rows below each other. Each has its own scale, since each can have its own unit: its
/// longest bar is its largest figure.
fn draw(rows: &[Row]) -> Result<String> {
    let heights = rows
        .iter()
        .map(|row| LINE + BAR * row.figures.len() as i32 + GAP);
    let height = 2 * MARGIN + heights.sum::<i32>();
    let mut picture = String::new();
    {
        let area = SVGBackend::with_string(&mut picture, (WIDTH as u32, height as u32));
        let area = area.into_drawing_area();
        let write = |text: &str, at: (i32, i32), side: HPos, size: i32| {
            let style = TextStyle::from((FONT, size).into_font())
                .color(&GREY)
                .pos(Pos::new(side, VPos::Center));
            let drawn = area.draw(&Text::new(text.to_owned(), at, style));
            drawn.map_err(|error| anyhow!("drawing {text:?}: {error}"))
        };
        let mut ways: Vec<&String> = rows.iter().flat_map(|row| row.figures.keys()).collect();
        ways.sort_unstable();
        ways.dedup();

        let mut y = MARGIN;
        for row in rows {
            let title = format!("{} ({})", row.what, row.unit);
            write(&title, (MARGIN, y + LINE / 2), HPos::Left, 14)?;
            y += LINE;
            let largest = row.figures.values().copied().fold(0.0, f64::max);
            for (way, figure) in &row.figures {
                let room = WIDTH - 2 * MARGIN - LABELS - FIGURES;
                let share = if largest > 0.0 { figure / largest } else { 0.0 };
                let (left, middle) = (MARGIN + LABELS, y + BAR / 2);
                let right = left + (share * f64::from(room)).round() as i32;
                let index = ways.iter().position(|known| *known == way).unwrap_or(0);
                let bar = Rectangle::new(
                    [(left, y + 2), (right.max(left + 1), y + BAR - 2)],
                    COLOURS[index % COLOURS.len()].filled(),
                );
                area.draw(&bar)
                    .map_err(|error| anyhow!("drawing a bar: {error}"))?;
                write(way, (left - 8, middle), HPos::Right, 12)?;
                write(&number(*figure), (right + 6, middle), HPos::Left, 12)?;
                y += BAR;
            }
            y += GAP;
        }
        area.present()
            .map_err(|error| anyhow!("drawing: {error}"))?;
    }
    Ok(picture)
}

/// A figure with three digits or more.
fn number(figure: f64) -> String {
    match figure {
        f if f >= 100.0 || f == 0.0 => format!("{f:.0}"),
        f if f >= 10.0 => format!("{f:.1}"),
        f if f >= 1.0 => format!("{f:.2}"),
        f => format!("{f:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{
        "threads": 2,
        "rows": [
            {"what": "decoding Q4_K_M", "unit": "tokens/s", "ratios": [],
             "figures": {"unix": 178.8, "ggml-rpc": 111.0, "ggml's CPU": 161.1}},
            {"what": "round trip", "unit": "us", "ratios": [],
             "figures": {"unix": 4.2, "ggml-rpc": 31.0}},
            {"what": "nothing", "unit": "us", "ratios": [], "figures": {}}
        ]
    }"#;

    #[test]
    fn plot_has_one_bar_and_two_labels_per_value() {
        let rows = parse(FILE, &[]).unwrap();
        assert_eq!(rows.len(), 2, "a row without figures is left out");
        let picture = draw(&rows).unwrap();
        assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
        assert_eq!(picture.matches("<rect").count(), 5);
        assert_eq!(picture.matches("<text").count(), 2 * 5 + 2);
        assert!(picture.contains("decoding Q4_K_M (tokens/s)"), "{picture}");
        // A configuration has the same colour in all rows.
        assert_eq!(
            picture.matches("#4A9054").count() + picture.matches("#4AA054").count(),
            2
        );
        assert!(
            !picture.contains("#000000") && !picture.contains("#FFFFFF"),
            "{picture}"
        );
    }

    #[test]
    fn plot_shows_only_selected_rows() {
        let rows = parse(FILE, &["trip".to_owned()]).unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].figures["ggml-rpc"], 31.0);
        assert!(parse(FILE, &["absent".to_owned()]).is_err());
        assert!(parse("{}", &[]).is_err());
    }
}
