//! Speeds of models beside their targets: tokens per second as shares of the rates of memory and
//! tensor cores, and relative to ggml's own backend. The table shows what was not measured as such.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};
use vgpu_check::{SHAPES, SyntheticModel};

use super::results::{OURS, Speeds, TIME_IS_UP, parts, plans, read, speeds};

/// Ways to run a model: the name in file names, and the description.
const WAYS: [(&str, &str); 7] = [
    (OURS, "launches"),
    ("vgpu_megakernel", "megakernel"),
    ("vgpu_general", "general kernels"),
    ("vgpu_plain", "plain layout"),
    ("vgpu_inproc", "in the process"),
    ("vgpu_inproc_megakernel", "in the process, megakernel"),
    (THEIRS, "ggml-cuda"),
];

const THEIRS: &str = "cuda";

/// The way with a shared window, and the same without.
const WINDOWS: [(&str, &str); 2] = [
    (OURS, "vgpu_inproc"),
    ("vgpu_megakernel", "vgpu_inproc_megakernel"),
];

/// Least share of the in-process speed that the way with a window must reach.
const MIN_WINDOW_SHARE: f64 = 0.98;

/// The tests of llama-bench: prompt processing, and text generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LlamaBenchTest {
    Prefill,
    Decode,
}

impl LlamaBenchTest {
    fn prefix(self) -> &'static str {
        match self {
            LlamaBenchTest::Prefill => "pp",
            LlamaBenchTest::Decode => "tg",
        }
    }
}

/// Least speeds of a model: as shares of the memory's rate (decoding) and the tensor cores' rate
/// (prefill), and relative to ggml's own backend.
struct Goal {
    model: &'static str,
    kind: LlamaBenchTest,
    share: Option<f64>,
    ratio: Option<f64>,
}

const GOALS: [Goal; 6] = [
    Goal {
        model: "8b-q4_k_m",
        kind: LlamaBenchTest::Decode,
        share: Some(0.70),
        ratio: Some(2.5),
    },
    Goal {
        model: "8b-q4_k_m",
        kind: LlamaBenchTest::Prefill,
        share: Some(0.60),
        ratio: Some(3.0),
    },
    Goal {
        model: "8b-f16",
        kind: LlamaBenchTest::Decode,
        share: Some(0.80),
        ratio: None,
    },
    Goal {
        model: "gpt-oss-20b-mxfp4",
        kind: LlamaBenchTest::Decode,
        share: None,
        ratio: Some(2.0),
    },
    Goal {
        model: "30b-a3b-q4_k_m",
        kind: LlamaBenchTest::Decode,
        share: None,
        ratio: Some(2.0),
    },
    Goal {
        model: "70b-q4_k_m",
        kind: LlamaBenchTest::Decode,
        share: Some(0.70),
        ratio: None,
    },
];

/// Bytes and operations per second.
#[derive(Debug, Clone, Copy)]
struct Rates {
    memory: f64,
    operations: f64,
}

/// Rates of data sheets: memory bandwidth, and dense f16 products.
const SHEETS: [(&str, Rates); 2] = [
    (
        "H200",
        Rates {
            memory: 4.8e12,
            operations: 989e12,
        },
    ),
    (
        "H100",
        Rates {
            memory: 3.35e12,
            operations: 989e12,
        },
    ),
];

/// A model, run in one way.
struct Row {
    model: &'static str,
    test: String,
    way: &'static str,
    speed: f64,
    of_sheet: Option<f64>,
    of_measured: Option<f64>,
    ratio: Option<f64>,
}

/// A target, and the best way with its value.
struct Verdict {
    what: String,
    least: f64,
    best: Option<(&'static str, f64)>,
}

impl Verdict {
    fn word(&self) -> &'static str {
        match self.best {
            None => "not measured",
            Some((_, value)) if value >= self.least => "reached",
            Some(_) => "MISSED",
        }
    }
}

/// Prints the table, and writes `speed.json` to the folder.
pub(super) fn print(folder: &Path, is_small: bool) -> anyhow::Result<()> {
    let (text, report) = tables(folder, is_small)?;
    print!("{text}");
    let path = folder.join("speed.json");
    fs::write(&path, format!("{report:#}\n")).with_context(|| path.display().to_string())
}

fn tables(folder: &Path, is_small: bool) -> anyhow::Result<(String, Value)> {
    let parts = parts(&read(&folder.join("parts.tsv"))?);
    let speeds = speeds(folder)?;
    let plans = plans(folder)?;
    let device = plans.values().find_map(|plan| plan["device"].as_str());
    let device = device.unwrap_or("an unknown device");
    let sheet = { SHEETS.iter() }
        .find(|(name, _)| device.contains(name))
        .map(|(_, rates)| *rates);
    let rate = |key: &str| plans.values().find_map(|plan| plan[key].as_f64());
    let measured = rate("bandwidth")
        .zip(rate("operations"))
        .map(|(memory, operations)| Rates { memory, operations });
    let model_of = |name: &str| {
        let model = SHAPES.into_iter().find(|model| model.name == name);
        let model = model.expect("targets are for published models");
        if is_small { model.small() } else { model }
    };

    let mut rows = Vec::new();
    let mut verdicts = Vec::new();
    for goal in &GOALS {
        let found = rows_of(goal, &model_of(goal.model), &speeds, sheet, measured);
        verdicts.extend(verdicts_of(goal, &found));
        rows.extend(found);
    }
    verdicts.push(window(&rows));

    let report = json!({
        "vgpu": crate::own_program::VERSION,
        "device": device,
        "small_models": is_small,
        "data_sheet": sheet.map(of_rates),
        "measured": measured.map(of_rates),
        "rows": rows.iter().map(|row| json!({
            "model": row.model, "test": row.test, "way": row.way, "tokens_per_second": row.speed,
            "of_data_sheet": row.of_sheet, "of_measured": row.of_measured,
            "of_ggml_cuda": row.ratio,
        })).collect::<Vec<_>>(),
        "goals": verdicts.iter().map(|it| json!({
            "what": it.what, "least": it.least, "got": it.best.map(|(_, value)| value),
            "way": it.best.map(|(way, _)| way), "result": it.word(),
        })).collect::<Vec<_>>(),
        "plans": plans,
        "parts": parts,
    });

    let mut out = String::new();
    let mut line = |text: String| writeln!(out, "{text}").expect("writing to a string");
    line(format!(
        "{device}{}",
        if is_small { ", small models" } else { "" }
    ));
    for (name, rates) in [("data sheet", sheet), ("measured", measured)] {
        let said = rates.map_or("not known".into(), |rates| {
            let (memory, operations) = (rates.memory / 1e9, rates.operations / 1e12);
            format!("{memory:.0} GB/s, {operations:.1} TFLOPS")
        });
        line(format!("{name}: {said}"));
    }
    for (name, plan) in &plans {
        let (Some(floor), Some(seconds)) = (
            plan["total"]["floor"].as_f64(),
            plan["seconds"].as_f64().filter(|&seconds| seconds > 0.0),
        ) else {
            continue;
        };
        line(format!(
            "the engine alone, {name}: {:.3} ms, at least {:.3} ms by what was measured ({:.0} %)",
            1e3 * seconds,
            1e3 * floor,
            100.0 * floor / seconds
        ));
    }
    for part in parts.iter().filter(|part| part.status != 0) {
        let why = match part.status {
            TIME_IS_UP => "its time was up".into(),
            other => format!("ended with {other}"),
        };
        line(format!("{}: {why} after {:.1} s", part.name, part.seconds));
    }
    line(format!(
        "{:20} {:>7} {:>26} {:>10} {:>10} {:>11} {:>12}",
        "model", "test", "way", "tokens/s", "of sheet", "of measured", "of ggml-cuda"
    ));
    for row in &rows {
        line(format!(
            "{:20} {:>7} {:>26} {:>10.1} {:>10} {:>11} {:>12}",
            row.model,
            row.test,
            row.way,
            row.speed,
            percent(row.of_sheet),
            percent(row.of_measured),
            row.ratio.map_or("-".into(), |ratio| format!("{ratio:.2}")),
        ));
    }
    line(format!(
        "{:48} {:>8} {:>8} {:>26}  {}",
        "what should be", "at least", "is", "best way", ""
    ));
    for it in &verdicts {
        let (way, value) = it.best.map_or(("-", "-".into()), |(way, value)| {
            (way, format!("{value:.2}"))
        });
        line(format!(
            "{:48} {:>8.2} {value:>8} {way:>26}  {}",
            it.what,
            it.least,
            it.word()
        ));
    }
    Ok((out, report))
}

fn of_rates(rates: Rates) -> Value {
    json!({"bytes_per_second": rates.memory, "operations_per_second": rates.operations})
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.1} %", 100.0 * share))
}

/// The ways in which the model of a target ran the test.
fn rows_of(
    goal: &Goal,
    model: &SyntheticModel,
    speeds: &Speeds,
    sheet: Option<Rates>,
    measured: Option<Rates>,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for ((name, test), by_way) in speeds {
        let count =
            { test.strip_prefix(goal.kind.prefix()) }.and_then(|count| count.parse::<u64>().ok());
        let Some(count) = count.filter(|_| name == goal.model) else {
            continue;
        };
        let share = |rates: Rates, speed: f64| match goal.kind {
            LlamaBenchTest::Decode => model.bytes_of_token() as f64 * speed / rates.memory,
            LlamaBenchTest::Prefill => {
                model.operations_of_token(count) as f64 * speed / rates.operations
            }
        };
        let theirs = by_way.get(THEIRS);
        for (way, words) in WAYS {
            let Some(&speed) = by_way.get(way) else {
                continue;
            };
            rows.push(Row {
                model: goal.model,
                test: test.clone(),
                way: words,
                speed,
                of_sheet: sheet.map(|rates| share(rates, speed)),
                of_measured: measured.map(|rates| share(rates, speed)),
                ratio: theirs.map(|theirs| speed / theirs),
            });
        }
    }
    rows
}

/// The value of the best way through a window for a target.
fn verdicts_of(goal: &Goal, rows: &[Row]) -> Vec<Verdict> {
    let what = |of: &str| format!("{} {}, {of}", goal.model, goal.kind.prefix());
    let best = |value: fn(&Row) -> Option<f64>| {
        let ours =
            { rows.iter() }.filter(|row| [WAYS[0].1, WAYS[1].1, WAYS[2].1].contains(&row.way));
        ours.filter_map(|row| Some((row.way, value(row)?)))
            .max_by(|(_, a), (_, b)| a.total_cmp(b))
    };
    let of = match goal.kind {
        LlamaBenchTest::Decode => "of the memory's rate",
        LlamaBenchTest::Prefill => "of the tensor cores' rate",
    };
    let share = goal.share.map(|least| Verdict {
        what: what(of),
        least,
        best: best(|row| row.of_sheet.or(row.of_measured)),
    });
    let ratio = goal.ratio.map(|least| Verdict {
        what: what("of ggml-cuda"),
        least,
        best: best(|row| row.ratio),
    });
    share.into_iter().chain(ratio).collect()
}

/// The share of the in-process decoding speed that the way with a window reaches, for the worst
/// pair of ways.
fn window(rows: &[Row]) -> Verdict {
    let words = |way: &str| {
        WAYS.iter()
            .find(|(name, _)| *name == way)
            .map(|(_, words)| *words)
    };
    let speed = |way: &str| {
        let mut all = rows.iter();
        let found = all.find(|row| Some(row.way) == words(way) && row.test.starts_with("tg"))?;
        Some((found.way, found.speed))
    };
    let left = |&(with, without): &(&'static str, &'static str)| {
        let (way, with) = speed(with)?;
        Some((way, with / speed(without)?.1))
    };
    Verdict {
        what: "8b-q4_k_m tg, unix window of in-process".into(),
        least: MIN_WINDOW_SHARE,
        best: WINDOWS
            .iter()
            .filter_map(left)
            .min_by(|(_, a), (_, b)| a.total_cmp(b)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with these files, and the report about it.
    fn tables_of(files: &[(&str, &str)], is_small: bool) -> (String, Value) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        tables(folder.path(), is_small).unwrap()
    }

    fn goal<'a>(report: &'a Value, what: &str) -> &'a Value {
        let goals = report["goals"].as_array().unwrap();
        let mut of = goals.iter().filter(|it| it["what"] == what);
        of.next().expect("a goal of this name")
    }

    #[test]
    fn table_shows_measured_values_beside_targets() {
        let tests = |pp: f64, tg: f64| {
            format!(
                r#"[{{"n_prompt": 2048, "n_gen": 0, "avg_ts": {pp}}},
                    {{"n_prompt": 0, "n_gen": 128, "avg_ts": {tg}}}]"#
            )
        };
        let (text, report) = tables_of(
            &[
                ("parts.tsv", "plan-8b\t0\t3.0\nwrite-70b\t124\t60\n"),
                (
                    "plan-8b.json",
                    r#"{"device": "NVIDIA H200", "bandwidth": 4.2e12, "operations": 7e14,
                    "seconds": 0.0015, "total": {"floor": 0.0012}}"#,
                ),
                ("bench-vgpu-8b-q4_k_m.json", &tests(30000.0, 500.0)),
                ("bench-vgpu_megakernel-8b-q4_k_m.json", &tests(1.0, 750.0)),
                ("bench-vgpu_inproc-8b-q4_k_m.json", &tests(1.0, 505.0)),
                (
                    "bench-vgpu_inproc_megakernel-8b-q4_k_m.json",
                    &tests(1.0, 800.0),
                ),
                ("bench-cuda-8b-q4_k_m.json", &tests(15000.0, 250.0)),
                ("bench-vgpu-70b-q4_k_m.json", "[{\"n_prompt\": 0"),
            ],
            false,
        );
        let of_memory = goal(&report, "8b-q4_k_m tg, of the memory's rate");
        assert_eq!(of_memory["result"], "reached");
        assert_eq!(of_memory["way"], "megakernel");
        let got = of_memory["got"].as_f64().unwrap();
        assert!((0.70..0.80).contains(&got), "{got}");
        assert_eq!(goal(&report, "8b-q4_k_m tg, of ggml-cuda")["got"], 3.0);
        let prefill = goal(&report, "8b-q4_k_m pp, of ggml-cuda");
        assert_eq!(
            (&prefill["got"], &prefill["result"]),
            (&json!(2.0), &json!("MISSED"))
        );
        let window = goal(&report, "8b-q4_k_m tg, unix window of in-process");
        assert_eq!(
            (&window["way"], &window["result"]),
            (&json!("megakernel"), &json!("MISSED"))
        );
        let large = goal(&report, "70b-q4_k_m tg, of the memory's rate");
        assert_eq!(large["result"], "not measured");
        for wanted in [
            "NVIDIA H200",
            "4800 GB/s",
            "its time was up",
            "80 %",
            "not measured",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
    }

    #[test]
    fn unknown_device_is_judged_by_its_measured_rates() {
        let (_, report) = tables_of(
            &[
                ("parts.tsv", ""),
                (
                    "plan-8b.json",
                    r#"{"device": "a processor", "bandwidth": 1e9, "operations": 1e9}"#,
                ),
                (
                    "bench-vgpu-8b-f16.json",
                    r#"[{"n_prompt": 0, "n_gen": 8, "avg_ts": 1000.0}]"#,
                ),
            ],
            true,
        );
        assert_eq!(report["data_sheet"], Value::Null);
        let row = &report["rows"][0];
        assert!(row["of_measured"].as_f64().unwrap() > 0.0);
        assert_eq!(row["of_ggml_cuda"], Value::Null);
        assert_eq!(
            goal(&report, "8b-f16 tg, of the memory's rate")["result"],
            "reached"
        );
    }
}
