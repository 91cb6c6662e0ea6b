//! The findings about a GPU, in a file that is rewritten with each finding: if the check is
//! interrupted, the file has what was found before.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Serialize;
use serde_json::{Value, json};

use super::findings::{CheckedDevice, Copies};

/// Findings, and their file.
pub(super) struct Report {
    all: Value,
    path: Option<PathBuf>,
    /// Why the file could not be written, if so.
    failed: Option<anyhow::Error>,
}

impl Report {
    /// A report without findings. Without a path no file is written.
    pub(super) fn new(path: Option<&Path>) -> Report {
        let mut report = Report {
            all: json!({
                "vgpu": crate::own_program::VERSION,
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

    pub(super) fn device(&mut self, device: &CheckedDevice) {
        self.all["engine"] = device.engine.clone().into();
        self.all["description"] = device.description.clone().into();
        self.all["memory"] = device.memory.into();
        self.save();
    }

    pub(super) fn copies(&mut self, copies: Copies) {
        self.all["copies"] = json!(copies);
        self.save();
    }

    /// Adds a finding to the list `key`.
    pub(super) fn add(&mut self, key: &str, finding: &impl Serialize) {
        if let Value::Array(list) = &mut self.all[key] {
            list.push(json!(finding));
        }
        self.save();
    }

    /// Marks the report as complete. Fails if the file could not be written.
    pub(super) fn end(mut self) -> anyhow::Result<()> {
        self.all["complete"] = true.into();
        self.save();
        self.failed.map_or(Ok(()), Err)
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
    use crate::gpu_check::findings::{BegunEntry, CaseFinding};

    fn read(path: &Path) -> Value {
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn report_file_is_updated_after_each_result() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("check.json");
        let mut report = Report::new(Some(&path));
        report.device(&CheckedDevice {
            engine: "cpu".into(),
            description: "2 threads".into(),
            memory: 1,
            free: 1,
            families: Vec::new(),
        });
        assert_eq!(read(&path)["engine"], "cpu");
        let begun = BegunEntry {
            name: "ADD".into(),
            kernels: vec!["vg_add".into()],
        };
        report.add("cases", &CaseFinding::ended(&begun, "it was silent".into()));
        let said = read(&path);
        assert_eq!(said["cases"][0]["failed"], "it was silent");
        assert_eq!(said["cases"][0]["kernels"][0], "vg_add");
        assert_eq!(said["complete"], false);
        report.end().unwrap();
        assert_eq!(read(&path)["complete"], true);
    }

    #[test]
    fn unwritable_report_file_is_reported_at_the_end() {
        let path = Path::new("/proc/there is no such folder/check.json");
        let error = Report::new(Some(path)).end().unwrap_err();
        assert!(format!("{error:#}").contains("check.json"), "{error:#}");
    }
}
