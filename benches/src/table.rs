//! Rows of figures, as text and as JSON.

use serde_json::{Value, json};

/// One measurement in several configurations.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) unit: &'static str,
    /// The configurations and their figures, each a median.
    pub(crate) figures: Vec<(String, f64)>,
    pub(crate) ratios: Vec<Ratio>,
}

/// The ratio of two figures of a row.
#[derive(Clone, Debug)]
pub(crate) struct Ratio {
    pub(crate) label: String,
    pub(crate) value: f64,
    /// The minimum that is required.
    pub(crate) target: Option<f64>,
}

impl Row {
    pub(crate) fn new(what: impl Into<String>, unit: &'static str) -> Row {
        Row {
            what: what.into(),
            unit,
            figures: Vec::new(),
            ratios: Vec::new(),
        }
    }

    pub(crate) fn figure(mut self, way: impl Into<String>, value: f64) -> Row {
        self.figures.push((way.into(), value));
        self
    }

    /// Adds how many times better `ours` is than `theirs`. `more`: larger figures are better.
    pub(crate) fn ratio(
        mut self,
        ours: &str,
        theirs: &str,
        more: bool,
        target: Option<f64>,
    ) -> Row {
        let find = |way: &str| {
            let found = self.figures.iter().find(|(name, _)| name == way);
            found.map(|&(_, value)| value).filter(|value| *value > 0.0)
        };
        if let (Some(a), Some(b)) = (find(ours), find(theirs)) {
            self.ratios.push(Ratio {
                label: format!("{ours} / {theirs}"),
                value: if more { a / b } else { b / a },
                target,
            });
        }
        self
    }

    /// Adds the ratio of an upper limit `most` to a figure.
    pub(crate) fn at_most(mut self, way: &str, most: f64) -> Row {
        if let Some(&(_, value)) = self.figures.iter().find(|(name, _)| name == way) {
            self.ratios.push(Ratio {
                label: format!("{way}, of {most} {} allowed", self.unit),
                value: if value > 0.0 {
                    most / value
                } else {
                    f64::INFINITY
                },
                target: Some(1.0),
            });
        }
        self
    }

    pub(crate) fn json(&self) -> Value {
        let figures = self
            .figures
            .iter()
            .map(|(way, value)| (way.clone(), json!(value)));
        let ratios = self.ratios.iter().map(|ratio| {
            let met = ratio.target.map(|target| ratio.value >= target);
            json!({
                "of": ratio.label,
                "times": finite(ratio.value),
                "target": ratio.target,
                "met": met,
            })
        });
        json!({
            "what": self.what,
            "unit": self.unit,
            "figures": figures.collect::<serde_json::Map<_, _>>(),
            "ratios": ratios.collect::<Vec<_>>(),
        })
    }

    pub(crate) fn lines(&self) -> String {
        let mut lines = format!("{} ({})\n", self.what, self.unit);
        for (way, value) in &self.figures {
            lines += &format!("    {way:<34} {:>12}\n", number(*value));
        }
        for ratio in &self.ratios {
            let verdict = match ratio.target {
                Some(target) if ratio.value >= target => format!("  (target {target}: met)"),
                Some(target) => format!("  (target {target}: MISSED)"),
                None => String::new(),
            };
            lines += &format!("    {:<34} {:>11.2}x{verdict}\n", ratio.label, ratio.value);
        }
        lines
    }
}

/// JSON has no infinity.
fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

fn number(value: f64) -> String {
    match value {
        v if v != 0.0 && v.abs() < 10.0 => format!("{v:.3}"),
        v if v.abs() < 1000.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_above_one_mean_better_for_every_unit() {
        let row = Row::new("round trip", "us")
            .figure("unix", 2.0)
            .figure("rpc", 30.0)
            .ratio("unix", "rpc", false, None)
            .ratio("unix", "absent", false, None)
            .at_most("unix", 5.0);
        let values: Vec<f64> = row.ratios.iter().map(|ratio| ratio.value).collect();
        assert_eq!(values, [15.0, 2.5]);
        let row = Row::new("decode", "tok/s")
            .figure("unix", 60.0)
            .figure("rpc", 50.0)
            .ratio("unix", "rpc", true, Some(1.35));
        assert!((row.ratios[0].value - 1.2).abs() < 1e-9);
        assert!(row.lines().contains("MISSED"), "{}", row.lines());
        assert_eq!(row.json()["figures"]["rpc"], 50.0);
        assert_eq!(row.json()["ratios"][0]["met"], false);
    }
}
