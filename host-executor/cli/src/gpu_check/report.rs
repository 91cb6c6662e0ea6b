//! The findings about a GPU, in a file that is rewritten with each finding: if the check is
//! interrupted, the file has what was found before.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Value, json};
use vgpu_check::{Case, Ceilings, Decoding, Outcome, Rate, Work};
use vgpu_engine::Engine;

/// Findings, and their file.
pub(super) struct Report {
    all: Value,
    path: Option<PathBuf>,
    /// Why the file could not be written, if so.
    failed: Option<anyhow::Error>,
}

impl Report {
    /// A report about an engine, without findings. Without a path no file is written.
    pub(super) fn new(engine: &dyn Engine, path: Option<&Path>) -> Report {
        let mut report = Report {
            all: json!({
                "vgpu": env!("CARGO_PKG_VERSION"),
                "engine": engine.name(),
                "description": engine.description(),
                "memory": engine.memory().total,
                "cases": [],
                "texts": [],
                "copies": null,
                "rates": [],
                "complete": false,
            }),
            path: path.map(Path::to_path_buf),
            failed: None,
        };
        report.save();
        report
    }

    pub(super) fn case(&mut self, case: &Case) {
        let case = match &case.outcome {
            Outcome::Compared { error, limit } => json!({
                "name": case.name, "right": case.is_right(), "error": error, "limit": limit,
                "kernels": case.kernels,
            }),
            Outcome::Failed(reason) => {
                let (name, failed) = (&case.name, reason.to_string());
                json!({"name": name, "right": false, "failed": failed, "kernels": case.kernels})
            }
        };
        self.add("cases", case);
    }

    pub(super) fn text(&mut self, text: &Decoding) {
        let text = match &text.outcome {
            Ok((all, same)) => json!({"name": text.name, "tokens": all, "same": same}),
            Err(reason) => json!({"name": text.name, "failed": reason.to_string()}),
        };
        self.add("texts", text);
    }

    pub(super) fn copies(&mut self, rates: &Ceilings) {
        let Ceilings {
            within,
            upload,
            download,
        } = rates;
        self.all["copies"] = json!({"within": within, "upload": upload, "download": download});
        self.save();
    }

    pub(super) fn rate(&mut self, rate: &Rate) {
        let unit = match rate.work {
            Work::Bytes => "bytes/s",
            Work::Operations => "FLOPS",
        };
        let rate = match &rate.rate {
            Ok(value) => json!({
                "name": rate.name, "unit": unit, "rate": value, "seconds": rate.seconds,
                "kernels": rate.kernels,
            }),
            Err(reason) => json!({"name": rate.name, "failed": reason.to_string()}),
        };
        self.add("rates", rate);
    }

    /// Marks the report as complete. Fails if the file could not be written.
    pub(super) fn end(mut self) -> anyhow::Result<()> {
        self.all["complete"] = true.into();
        self.save();
        self.failed.map_or(Ok(()), Err)
    }

    fn add(&mut self, key: &str, value: Value) {
        if let Value::Array(list) = &mut self.all[key] {
            list.push(value);
        }
        self.save();
    }

    /// Replaces the file atomically. After a failure the file is not written again.
    fn save(&mut self) {
        let (Some(path), None) = (&self.path, &self.failed) else {
            return;
        };
        let fresh = path.with_extension("fresh");
        let written = std::fs::write(&fresh, format!("{:#}\n", self.all))
            .and_then(|()| std::fs::rename(&fresh, path))
            .with_context(|| format!("writing {}", path.display()));
        self.failed = written.err();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_check::CheckError;
    use vgpu_cpu::CpuEngine;

    fn read(path: &Path) -> Value {
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn report_file_is_updated_after_each_result() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("check.json");
        let engine = CpuEngine::new(1, None).unwrap();
        let mut report = Report::new(&engine, Some(&path));
        assert_eq!(read(&path)["engine"], "cpu");
        let case = Case {
            name: "ADD".to_owned(),
            outcome: Outcome::Failed(CheckError::DriverMissing),
            kernels: vec!["vg_add"],
        };
        report.case(&case);
        let said = read(&path);
        assert_eq!(
            said["cases"][0]["failed"],
            "NVIDIA's driver is not installed: install it (525 or newer), then run this again"
        );
        assert_eq!(said["cases"][0]["kernels"][0], "vg_add");
        assert_eq!(said["complete"], false);
        report.end().unwrap();
        assert_eq!(read(&path)["complete"], true);
    }

    #[test]
    fn unwritable_report_file_is_reported_at_the_end() {
        let engine = CpuEngine::new(1, None).unwrap();
        let path = Path::new("/proc/there is no such folder/check.json");
        let error = Report::new(&engine, Some(path)).end().unwrap_err();
        assert!(format!("{error:#}").contains("check.json"), "{error:#}");
    }
}
