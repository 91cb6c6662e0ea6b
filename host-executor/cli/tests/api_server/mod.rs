//! A stand-in for the API server of a cluster: it keeps objects at their paths, with versions, and
//! is as strict as the API server with those that drivers write. Over HTTP without TLS.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use serde_json::{Value, json};

/// The token of the account.
pub(crate) const TOKEN: &str = "token-of-the-account";

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

struct State {
    objects: BTreeMap<String, Value>,
    version: u64,
    /// Whether claims can share a device: the feature `DRAConsumableCapacity`.
    is_consumable: bool,
    /// The requests that were refused, but for objects that are not there.
    refused: Vec<String>,
    /// Requests that write.
    writes: u64,
    answers: Answers,
}

/// How requests are answered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answers {
    /// As by an API server.
    Right,
    /// Not at all: connections stay open.
    Never,
    /// As by a server that knows none of these paths.
    UnknownPath,
}

#[derive(Clone)]
pub(crate) struct ApiServer {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl ApiServer {
    pub(crate) fn start(is_consumable: bool) -> ApiServer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = ApiServer {
            address: listener.local_addr().expect("an address"),
            state: Arc::new(Mutex::new(State {
                objects: BTreeMap::new(),
                version: 0,
                is_consumable,
                refused: Vec::new(),
                writes: 0,
                answers: Answers::Right,
            })),
        };
        let own = server.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let own = own.clone();
                thread::spawn(move || own.serve(stream));
            }
        });
        server
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test has panicked")
    }

    /// The object at a path.
    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.state().objects.get(path).cloned()
    }

    /// Puts an object at a path, or takes it away.
    pub(crate) fn set(&self, path: &str, object: Option<Value>) {
        let mut state = self.state();
        match object {
            None => drop(state.objects.remove(path)),
            Some(mut object) => {
                state.version += 1;
                object["metadata"]["resourceVersion"] = json!(state.version.to_string());
                state.objects.insert(path.into(), object);
            }
        }
    }

    /// What was refused.
    pub(crate) fn refused(&self) -> Vec<String> {
        self.state().refused.clone()
    }

    /// How many requests have written something.
    pub(crate) fn writes(&self) -> u64 {
        self.state().writes
    }

    /// How requests are answered from now on.
    pub(crate) fn set_answers(&self, answers: Answers) {
        self.state().answers = answers;
    }

    fn serve(&self, stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        while let Some((method, path, token, body)) = read_request(&mut stream) {
            let mut state = self.state();
            let (status, answer) = match (state.answers, token == format!("Bearer {TOKEN}")) {
                (Answers::Never, _) => {
                    drop(state);
                    let _ = stream.read_line(&mut String::new()); // until the client ends it
                    return;
                }
                (Answers::UnknownPath, _) => (404, json!("404 page not found")),
                (Answers::Right, true) => state.answer(&method, &path, &body),
                (Answers::Right, false) => (401, refusal(401, "Unauthorized")),
            };
            if status >= 400 && status != 404 {
                let text = format!("{method} {path}: {status} {}", answer["message"]);
                state.refused.push(text);
            }
            drop(state);
            let text = answer.to_string();
            let head = format!(
                "HTTP/1.1 {status} .\r\nContent-Type: application/json\r\nContent-Length: \
                 {}\r\n\r\n",
                text.len()
            );
            let sent = stream.get_mut().write_all((head + &text).as_bytes());
            if sent.is_err() {
                return;
            }
        }
    }
}

/// A request: method, path, the header `Authorization`, and the body.
fn read_request(stream: &mut BufReader<TcpStream>) -> Option<(String, String, String, Vec<u8>)> {
    let mut line = String::new();
    stream.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let (mut token, mut length) = (String::new(), 0);
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).ok()?;
        let Some((name, value)) = header.trim().split_once(':') else {
            break;
        };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => token = value.trim().into(),
            "content-length" => length = value.trim().parse().ok()?,
            _ => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some((method, path, token, body))
}

fn refusal(status: u16, message: &str) -> Value {
    json!({"kind": "Status", "status": "Failure", "message": message, "code": status})
}

fn absent(path: &str) -> Value {
    let name = path.rsplit('/').next().unwrap_or_default();
    let mut refusal = refusal(404, "not found");
    refusal["reason"] = json!("NotFound");
    refusal["details"] = json!({"name": name});
    refusal
}

impl State {
    fn answer(&mut self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let there = self.objects.get(path).cloned();
        match (method, there) {
            ("GET", Some(object)) => (200, object),
            ("GET" | "PUT", None) => (404, absent(path)),
            ("POST" | "PUT", there) => {
                let Ok(object) = serde_json::from_slice::<Value>(body) else {
                    return (400, refusal(400, "the body is no JSON"));
                };
                self.write(path, object, there.as_ref())
            }
            _ => (405, refusal(405, "not allowed")),
        }
    }

    /// Makes a slice, or replaces the one that is `there`.
    fn write(&mut self, path: &str, mut object: Value, there: Option<&Value>) -> (u16, Value) {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let own = format!("{SLICES}/{name}");
        let is_new = there.is_none();
        if path != if is_new { SLICES } else { &own } {
            return (403, refusal(403, "the account may write slices only"));
        }
        if is_new && self.objects.contains_key(&own) {
            return (409, refusal(409, "it exists"));
        }
        if let Some(there) = there {
            if there["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                return (409, refusal(409, "another version is there"));
            }
            if generation(&object) <= generation(there) {
                return (
                    422,
                    refusal(422, "the generation is not above the last one"),
                );
            }
        }
        if let Some(fault) = fault(&object) {
            return (422, refusal(422, &fault));
        }
        if !self.is_consumable {
            // The API server drops what it does not know.
            let devices = object["spec"]["devices"].as_array_mut();
            for device in devices.into_iter().flatten() {
                if let Some(device) = device.as_object_mut() {
                    device.remove("allowMultipleAllocations");
                }
                let capacity = device["capacity"].as_object_mut();
                for one in capacity.into_iter().flat_map(|all| all.values_mut()) {
                    if let Some(one) = one.as_object_mut() {
                        one.remove("requestPolicy");
                    }
                }
            }
        }
        self.version += 1;
        self.writes += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(own, object.clone());
        (if is_new { 201 } else { 200 }, object)
    }
}

fn generation(slice: &Value) -> i64 {
    slice["spec"]["pool"]["generation"].as_i64().unwrap_or(-1)
}

/// What the API server would refuse of a slice. Quantities here are whole numbers, some of `Mi`.
fn fault(slice: &Value) -> Option<String> {
    let spec = &slice["spec"];
    if slice["apiVersion"] != "resource.k8s.io/v1" || slice["kind"] != "ResourceSlice" {
        return Some("it is no slice".into());
    }
    let owner = &slice["metadata"]["ownerReferences"][0];
    if owner["uid"].as_str().is_none_or(str::is_empty) {
        return Some("an owner without an id".into());
    }
    if spec["nodeName"].as_str().is_none() || spec["pool"]["resourceSliceCount"] != 1 {
        return Some("no node, or a wrong number of slices".into());
    }
    for device in spec["devices"].as_array()? {
        for (name, capacity) in device["capacity"].as_object()? {
            let number = |value: &Value| -> Option<u64> {
                let text = value.as_str()?;
                let (digits, factor) = match text.strip_suffix("Mi") {
                    Some(digits) => (digits, 1 << 20),
                    None => (text, 1),
                };
                Some(digits.parse::<u64>().ok()? * factor)
            };
            let (value, policy) = (number(&capacity["value"]), &capacity["requestPolicy"]);
            let default = number(&policy["default"]);
            let (Some(value), Some(default)) = (value, default) else {
                return Some(format!("{name}: no value, or no default"));
            };
            let range = &policy["validRange"];
            let is_valid = match (range.is_null(), policy["validValues"].as_array()) {
                (true, Some(values)) => values.iter().any(|one| number(one) == Some(default)),
                // With a step, the scheduler of Kubernetes 1.34 computes in numbers that wrap.
                (false, None) if range["step"].is_null() => {
                    number(&range["min"]).is_some_and(|min| min <= default && min <= value)
                }
                _ => false,
            };
            if !is_valid {
                return Some(format!("{name}: the policy is not valid"));
            }
        }
    }
    None
}
