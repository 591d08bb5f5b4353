//! What a service is declared to be, checked once.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use muxflow_agent::{config, sys};
use muxflow_api::service::{HealthDeclaration, ServiceDeclaration};
use muxflow_types::{GpuType, Micros, ServiceId};

use crate::ServiceError;

/// Stands for the replica's port in arguments and variables.
pub const PORT_WORD: &str = "{port}";

/// How a replica is asked whether it is well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthCheck {
    /// What is fetched; any 2xx is good.
    pub path: String,
    /// How often.
    pub every: Duration,
    /// How long an answer may take.
    pub within: Duration,
    /// So many failures in a row take a replica out.
    pub down_after: u32,
    /// A replica that has been out for so long is started anew.
    pub restart_after: Duration,
}

/// A service, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct ServiceSpec {
    /// Its name.
    pub name: ServiceId,
    /// Program and arguments; [`PORT_WORD`] becomes the replica's port, which is in `PORT` too.
    pub argv: Vec<String>,
    /// Variables it asks for.
    pub env: BTreeMap<String, String>,
    /// Where it runs.
    pub cwd: PathBuf,
    /// User and group; none means the daemon's, which is what it was declared for then.
    pub user: Option<(u32, u32)>,
    /// GPUs of this type only.
    pub gpu_type: Option<GpuType>,
    /// Where the front listens; port 0 picks one.
    pub listen: SocketAddr,
    /// Never fewer replicas than this.
    pub min_replicas: u32,
    /// Never more.
    pub max_replicas: u32,
    /// Requests under way at once that one replica carries well.
    pub load_per_replica: f64,
    /// The health check.
    pub health: HealthCheck,
    /// What the 99th percentile of latency is held against.
    pub slo: Option<Micros>,
    /// Fail-prone jobs are kept off its GPUs.
    pub critical: bool,
    /// A request that takes longer is answered with 504.
    pub request_within: Duration,
    /// How long requests under way may take when a replica is to leave.
    pub drain_within: Duration,
}

fn millis(service: &str, field: &'static str, value: u64) -> Result<Duration, ServiceError> {
    if (1..=3_600_000).contains(&value) {
        return Ok(Duration::from_millis(value));
    }
    let problem = format!("is {value}; it must be between 1 and 3600000 milliseconds");
    Err(ServiceError::Declaration { service: service.to_owned(), field, problem })
}

/// A directory that a kernel could take; whether it is there is seen when a replica starts.
fn cwd_check(path: &str) -> Result<(), String> {
    if !path.starts_with('/') {
        return Err(format!("`{path}` is not an absolute path; begin it with `/`"));
    }
    if path.contains('\0') || path.len() > 4096 {
        return Err("must be at most 4096 bytes, none of them zero".into());
    }
    Ok(())
}

impl ServiceSpec {
    /// Checks a declaration.
    pub fn new(raw: &ServiceDeclaration) -> Result<Self, ServiceError> {
        let service = raw.name.as_str();
        let bad = |field: &'static str, problem: String| ServiceError::Declaration {
            service: service.to_owned(),
            field,
            problem,
        };
        let name = ServiceId::new(service).map_err(|e| bad("name", e.to_string()))?;
        // A replica's name is made from it and becomes the name of files and control groups.
        if service.len() > 63 || service.contains(['/', ':']) {
            return Err(bad("name", "must be at most 63 characters without `/` and `:`".into()));
        }
        if raw.command.first().is_none_or(String::is_empty) {
            return Err(bad("command", "is empty: give the program and its arguments".into()));
        }
        let with_zero = |text: &String| text.contains('\0');
        let names = raw.env.keys().any(|n| n.is_empty() || n.contains(['=', '\0']));
        if names || raw.command.iter().chain(raw.env.values()).any(with_zero) {
            return Err(bad("env", "or `command` has a zero byte, or a name with `=`".into()));
        }
        cwd_check(raw.cwd.as_deref().unwrap_or("/")).map_err(|problem| bad("cwd", problem))?;
        if raw.min_replicas > raw.max_replicas || raw.max_replicas == 0 || raw.max_replicas > 64 {
            let (min, max) = (raw.min_replicas, raw.max_replicas);
            let problem = format!(
                "is {max} and `min_replicas` {min}: they must hold 0 <= min <= max, 1 <= max <= 64"
            );
            return Err(bad("max_replicas", problem));
        }
        if !(raw.load_per_replica.is_finite() && (0.01..=10_000.0).contains(&raw.load_per_replica))
        {
            return Err(bad("load_per_replica", "must lie between 0.01 and 10000".into()));
        }
        let gpu_type = raw.gpu_type.as_deref().map(GpuType::new).transpose();
        let slo = raw.slo_ms.map(|ms| Micros::from_secs_f64(ms / 1e3)).transpose();
        let slo = slo.map_err(|e| bad("slo_ms", e.to_string()))?;
        if slo == Some(Micros::ZERO) {
            return Err(bad("slo_ms", "must be above 0; leave it out for none".into()));
        }
        Ok(ServiceSpec {
            name,
            argv: raw.command.clone(),
            env: raw.env.clone(),
            cwd: raw.cwd.clone().map_or_else(|| "/".into(), PathBuf::from),
            user: user(raw.user.as_deref(), sys::own_uid())
                .map_err(|problem| bad("user", problem))?,
            gpu_type: gpu_type.map_err(|e| bad("gpu_type", e.to_string()))?,
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), raw.port),
            min_replicas: raw.min_replicas,
            max_replicas: raw.max_replicas,
            load_per_replica: raw.load_per_replica,
            health: check(service, &raw.health)?,
            slo,
            critical: raw.critical,
            request_within: millis(service, "request_within_ms", raw.request_within_ms)?,
            drain_within: millis(service, "drain_within_ms", raw.drain_within_ms)?,
        })
    }

    /// A short mark of all that a replica is started and asked with: where it differs, a replica must
    /// be replaced. It is written down, so it must not change from one version to the next.
    pub fn mark(&self) -> String {
        let HealthCheck { path, every, within, down_after, restart_after } = &self.health;
        let mut words = vec![format!("{}", self.argv.len())];
        words.extend(self.argv.iter().cloned());
        words.extend(self.env.iter().map(|(name, value)| format!("{name}={value}")));
        words.push(self.cwd.display().to_string());
        words.push(self.user.map_or_else(String::new, |(uid, gid)| format!("{uid}:{gid}")));
        words.push(self.gpu_type.as_ref().map_or_else(String::new, ToString::to_string));
        let times = [every, within, restart_after].map(|time| time.as_millis());
        words.push(format!("{path} {times:?} {down_after}"));
        // FNV-1a.
        let step = |sum: u64, byte: u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let bytes = words.iter().flat_map(|word| word.bytes().chain([0]));
        format!("{:016x}", bytes.fold(0xcbf2_9ce4_8422_2325, step))
    }

    /// Program and arguments of a replica on a port.
    pub fn argv_on(&self, port: u16) -> Vec<String> {
        self.argv.iter().map(|word| word.replace(PORT_WORD, &port.to_string())).collect()
    }

    /// Variables of a replica on a port.
    pub fn env_on(&self, port: u16) -> BTreeMap<String, String> {
        let filled =
            |(n, v): (&String, &String)| (n.clone(), v.replace(PORT_WORD, &port.to_string()));
        let mut env = BTreeMap::new();
        if let Some(user) = self.user.and_then(|(uid, _)| sys::user_by_id(uid)) {
            env.insert("HOME".to_owned(), user.home);
            env.insert("USER".to_owned(), user.name.clone());
            env.insert("LOGNAME".to_owned(), user.name);
        }
        env.extend(self.env.iter().map(filled));
        env.entry("PORT".into()).or_insert_with(|| port.to_string());
        env
    }
}

/// Whom a service runs as under a daemon of the user `own`, who can become others only as root.
fn user(text: Option<&str>, own: u32) -> Result<Option<(u32, u32)>, String> {
    let Some(text) = text else { return Ok(None) };
    let found = config::parse_user(text)
        .ok_or_else(|| format!("`{text}` is no user here; give a name, a number or `uid:gid`"))?;
    match own {
        0 => Ok(Some(found)),
        own if found.0 == own => Ok(None),
        own => Err(format!(
            "is `{text}`, but this daemon does not run as root and can start services only as its own user ({own})"
        )),
    }
}

fn check(service: &str, raw: &HealthDeclaration) -> Result<HealthCheck, ServiceError> {
    let bad = |field: &'static str, problem: &str| ServiceError::Declaration {
        service: service.to_owned(),
        field,
        problem: problem.into(),
    };
    let printable = raw.path.bytes().all(|b| b.is_ascii_graphic());
    if !raw.path.starts_with('/') || !printable || raw.path.len() > 1024 {
        return Err(bad("health.path", "must be a path such as `/healthz`"));
    }
    if raw.down_after == 0 {
        return Err(bad("health.down_after", "is 0; it must be at least 1"));
    }
    Ok(HealthCheck {
        path: raw.path.clone(),
        every: millis(service, "health.every_ms", raw.every_ms)?,
        within: millis(service, "health.within_ms", raw.within_ms)?,
        down_after: raw.down_after,
        restart_after: millis(service, "health.restart_after_ms", raw.restart_after_ms)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(json: &str) -> Result<ServiceSpec, ServiceError> {
        ServiceSpec::new(&serde_json::from_str(json).unwrap())
    }

    #[test]
    fn little_is_needed_and_the_port_is_filled_in() {
        let spec =
            declared(r#"{"name": "r", "command": ["serve", "--listen", "127.0.0.1:{port}"]}"#);
        let spec = spec.unwrap();
        assert_eq!((spec.min_replicas, spec.max_replicas), (1, 1));
        assert_eq!(spec.argv_on(81), ["serve", "--listen", "127.0.0.1:81"]);
        assert_eq!(spec.env_on(81)["PORT"], "81");
    }

    #[test]
    fn the_mark_changes_with_what_a_replica_is_started_with() {
        let mark = |more: &str| {
            declared(&format!(r#"{{"name": "r", "command": ["a", "b"]{more}}}"#)).unwrap().mark()
        };
        assert_eq!(mark(""), "86922f9d0cf1be2b", "files of this version must be understood later");
        for same in [r#", "slo_ms": 5"#, r#", "max_replicas": 4"#, r#", "critical": true"#] {
            assert_eq!(mark(same), mark(""), "{same}");
        }
        let others = [
            r#", "env": {"A": "1"}"#,
            r#", "env": {"A": "2"}"#,
            r#", "cwd": "/tmp""#,
            r#", "gpu_type": "T4""#,
            r#", "health": {"path": "/x"}"#,
            r#", "health": {"every_ms": 7}"#,
        ];
        let mut marks: Vec<String> = others.iter().map(|more| mark(more)).collect();
        marks.push(mark(""));
        marks.push(declared(r#"{"name": "r", "command": ["a"], "env": {}}"#).unwrap().mark());
        let count = marks.len();
        marks.sort();
        marks.dedup();
        assert_eq!(marks.len(), count);
    }

    #[test]
    fn only_a_daemon_of_root_starts_services_of_others() {
        assert_eq!(user(None, 0), Ok(None));
        assert_eq!(user(Some("65534:7"), 0), Ok(Some((65_534, 7))));
        assert_eq!(user(Some("4000000"), 4_000_000), Ok(None));
        assert!(user(Some("65534"), 4_000_000).unwrap_err().contains("does not run as root"));
        assert!(user(Some("no-such-user-here"), 0).unwrap_err().contains("no user here"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, field) in [
            (r#"{"name": "a b", "command": ["x"]}"#, "`name`"),
            (r#"{"name": "a/b", "command": ["x"]}"#, "`name`"),
            (r#"{"name": "a", "command": []}"#, "`command`"),
            (r#"{"name": "a", "command": ["x"], "max_replicas": 0}"#, "`max_replicas`"),
            (r#"{"name": "a", "command": ["x"], "min_replicas": 3}"#, "`max_replicas`"),
            (r#"{"name": "a", "command": ["x"], "load_per_replica": 0}"#, "`load_per_replica`"),
            (r#"{"name": "a", "command": ["x"], "slo_ms": -1}"#, "`slo_ms`"),
            (r#"{"name": "a", "command": ["x"], "slo_ms": 0}"#, "`slo_ms`"),
            (r#"{"name": "a", "command": ["x"], "health": {"path": "x"}}"#, "`health.path`"),
            (r#"{"name": "a", "command": ["x"], "health": {"every_ms": 0}}"#, "`health.every_ms`"),
            (r#"{"name": "a", "command": ["x"], "env": {"A=B": "1"}}"#, "`env`"),
            (r#"{"name": "a", "command": ["x"], "cwd": ""}"#, "`cwd`"),
            (r#"{"name": "a", "command": ["x"], "cwd": "here"}"#, "`cwd`"),
            (r#"{"name": "a", "command": ["x"], "cwd": "/a\u0000b"}"#, "`cwd`"),
            (r#"{"name": "a", "command": ["x"], "user": "no-such-user-here"}"#, "`user`"),
        ] {
            let error = declared(json).unwrap_err().to_string();
            assert!(error.contains(field), "{json}: {error}");
        }
        let unknown = serde_json::from_str::<ServiceDeclaration>(r#"{"name": "a", "comand": []}"#);
        assert!(unknown.unwrap_err().to_string().contains("comand"));
    }
}
