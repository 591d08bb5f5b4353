//! Configuration files that are good, and what is said of those that are not.

use super::*;

fn read(text: &str) -> Result<AgentConfig> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.toml");
    std::fs::write(&path, text).unwrap();
    AgentConfig::read(&path)
}

#[test]
fn an_empty_file_is_the_defaults() {
    let config = read("").unwrap();
    assert_eq!(config.sample_every, Duration::from_millis(10));
    assert!(config.mps.is_some() && config.pass_env.contains(&"PATH".to_owned()));
    assert_eq!(config.defences, Defences::default());
}

#[test]
fn workloads_are_read() {
    let config = read(
        "[[online]]\nservice = 'resnet'\ngpu = '0'\nargv = ['serve']\nuser = '65534:65534'\n[[offline]]\njob = 'train'\nargv = ['python', 't.py']\ncpus = '0'\nmemory = '2GiB'\nquota = '1GiB'\nstop = { checkpoint_ms = 500 }\n",
    )
    .unwrap();
    assert_eq!(config.online[0].1.user, Some((65534, 65534)));
    let job = &config.offline[0];
    assert_eq!(job.quota, Some(Bytes::from_gib(1)));
    assert_eq!((job.stop.checkpoint_ms, job.stop.drain_ms), (500, 2_000));
    assert_eq!(job.limits.memory_bytes, Some(2 << 30));
}

#[test]
fn errors_name_the_place_and_the_remedy() {
    let says = |text: &str| read(text).unwrap_err().to_string();
    assert!(says("state_dir = '/x'\ntik_ms = 3\n").contains("line 2"), "{}", says("tik_ms = 3"));
    assert!(says("tick_ms = 0").contains("tick_ms is 0; it must be between 1 and 100"));
    let bad = says("[[offline]]\njob = 'j'\nargv = ['x']\ncpus = 'all'\n");
    assert!(bad.contains("offline `j`.cpus") && bad.contains("0-3,8"), "{bad}");
    assert!(says("[[offline]]\njob = 'j'\nargv = []\n").contains("argv is empty"));
    let user = says("[[offline]]\njob = 'j'\nargv = ['x']\nuser = 'no such user'\n");
    assert!(user.contains("no such user"), "{user}");
    assert!(says("laws = 'missing.toml'").contains("missing.toml"));
}

#[test]
fn users_by_name_and_number() {
    assert_eq!(parse_user("root"), Some((0, 0)));
    assert_eq!(parse_user("1234"), Some((1234, 1234)));
    assert_eq!(parse_user("1:2"), Some((1, 2)));
    assert_eq!(parse_user("a b"), None);
}

#[test]
fn the_breaker_is_set_and_checked() {
    let config =
        read("[breaker]\nwindow_s = 5\nalways = 7\nshare_pct = 25\ncalm_for_s = 9\n").unwrap();
    let wanted = BreakerParams {
        window: Micros::from_secs(5),
        always: 7,
        share: 0.25,
        calm_for: Micros::from_secs(9),
    };
    assert_eq!(config.breaker, wanted);
    for (text, field) in [
        ("[breaker]\nshare_pct = 101\n", "breaker.share_pct"),
        ("[breaker]\nwindow_s = 0\n", "breaker.window_s"),
        ("[breaker]\nsometimes = 1\n", "sometimes"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
}
