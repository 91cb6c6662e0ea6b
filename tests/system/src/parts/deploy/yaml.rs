//! Reads YAML with the parser that the validator of Kubernetes brings.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use xtask_common::{packages, process};

use crate::test_run::TestRun;

/// The one document of a file.
pub(super) fn read(tests: &TestRun<'_>, file: &Path) -> Result<Value> {
    let mut documents = read_all(tests, file)?;
    let document = documents.pop().context("the file has no document")?;
    ensure!(documents.is_empty(), "the file has several documents");
    Ok(document)
}

/// All documents of a file.
pub(super) fn read_all(tests: &TestRun<'_>, file: &Path) -> Result<Vec<Value>> {
    let validator = packages::kubernetes_validate(tests.cache)?;
    let mut parse = Command::new(validator.with_file_name("python"));
    parse.args([
        "-c",
        "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))",
    ]);
    let text = process::output(parse.arg(file))?;
    serde_json::from_str(&text).context("reading what Python has printed")
}
