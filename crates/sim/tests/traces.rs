//! Traces of every kind, and what is wrong with broken ones.

#![expect(clippy::unwrap_used, reason = "a failed test says where")]

use std::io::Write;
use std::path::{Path, PathBuf};

use muxflow_sim::trace::{MultiGpu, read_jobs, read_requests, write_jobs, write_requests};

fn file(dir: &tempfile::TempDir, name: &str, text: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn gz(text: &[u8]) -> Vec<u8> {
    let mut e = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    e.write_all(text).unwrap();
    e.finish().unwrap()
}

fn error(path: &Path) -> String {
    let e = read_jobs(path, None, MultiGpu::One).unwrap_err();
    let mut text = e.to_string();
    if let Some(source) = std::error::Error::source(&e) {
        text.push_str(&format!(": {source}"));
    }
    text
}

#[test]
fn every_kind_of_job_trace_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&str, &str, &str, f64, f64); 5] = [
        (
            "own.csv",
            "own",
            "job_id,submit_s,duration_s,gpus,workload\nb,30,5,1,x\na,10,7,1,y\n",
            20.0,
            5.0,
        ),
        (
            "philly.csv",
            "Philly",
            "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,aa\n2017-10-09 07:00:55,10,8,80,bb\n",
            60.0,
            66.0,
        ),
        (
            "muri.csv",
            "Muri",
            "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval\n0,1,0,5,dqn,128,2000,1\n1,8,3000,5,gpt2,4,9000,1\n",
            3.0,
            9.0,
        ),
        (
            "helios.csv",
            "Helios",
            "job_id,user,gpu_num,state,submit_time,start_time,end_time,duration,vc\n7,u,1,COMPLETED,2020-04-01 00:00:00,x,x,5,vc1\n8,u,2,FAILED,2020-04-01 00:00:40,x,x,90,vc1\n9,u,0,COMPLETED,2020-04-01 00:00:40,x,x,90,vc1\n",
            40.0,
            90.0,
        ),
        (
            "openb.csv",
            "openb",
            "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\np0,1,1,1,1000,,LS,Running,100,700,100\np1,1,1,1,500,,BE,Running,150,650,150\np2,1,1,0,0,,BE,Running,150,650,150\n",
            50.0,
            500.0,
        ),
    ];
    for (name, kind, text, last_submit, last_duration) in cases {
        for (suffix, bytes) in [("", text.as_bytes().to_vec()), (".gz", gz(text.as_bytes()))] {
            let path = file(&dir, &format!("{name}{suffix}"), &bytes);
            let trace = read_jobs(&path, None, MultiGpu::One).unwrap();
            assert_eq!(trace.kind, kind);
            assert_eq!(trace.jobs.len(), 2, "{name}");
            assert_eq!(trace.jobs[0].submit_s, 0.0);
            let last = &trace.jobs[1];
            assert!((last.submit_s - last_submit).abs() < 1e-6, "{name} {last:?}");
            assert!((last.duration_s - last_duration).abs() < 1e-6, "{name} {last:?}");
        }
    }
    let philly = dir.path().join("philly.csv");
    assert_eq!(read_jobs(&philly, Some("bb"), MultiGpu::Split).unwrap().jobs.len(), 8);
    assert_eq!(read_jobs(&philly, None, MultiGpu::Drop).unwrap().jobs.len(), 1);
}

#[test]
fn the_raw_philly_log_is_read_element_by_element() {
    let dir = tempfile::tempdir().unwrap();
    let text = r#"[
 {"status":"Pass","vc":"ee9e8c","jobid":"application_1","attempts":[{"start_time":"2017-10-09 07:02:00","end_time":"2017-10-09 07:03:00","detail":[{"ip":"m1","gpus":["gpu0","gpu1"]}]},{"start_time":"2017-10-09 07:04:00","end_time":"2017-10-09 07:04:30","detail":[{"ip":"m1","gpus":["gpu0","gpu1"]}]}],"submitted_time":"2017-10-09 07:01:00","user":"u"},
 {"status":"Killed","vc":"ee9e8c","jobid":"application_2","attempts":[],"submitted_time":"2017-10-09 07:01:00","user":"u"},
 {"status":"Pass","vc":"other","jobid":"application_3","attempts":[{"start_time":"2017-10-09 08:02:00","end_time":"2017-10-09 08:03:00","detail":[{"ip":"m1","gpus":["gpu0"]}]}],"submitted_time":"2017-10-09 08:01:00","user":"u"}
]"#;
    let path = file(&dir, "cluster_job_log", text.as_bytes());
    let all = read_jobs(&path, None, MultiGpu::One).unwrap();
    assert_eq!((all.kind, all.jobs.len(), all.skipped), ("Philly, raw", 2, 1));
    assert_eq!((all.jobs[0].duration_s, all.jobs[0].gpus), (90.0, 2));
    assert_eq!(read_jobs(&path, Some("other"), MultiGpu::One).unwrap().jobs.len(), 1);
    let broken = file(&dir, "broken", &text.as_bytes()[..700]);
    let e = error(&broken);
    assert!(e.contains("line"), "{e}");
    let negative = file(&dir, "negative", text.replace("07:03:00", "07:01:00").as_bytes());
    assert!(error(&negative).contains("negative"), "{}", error(&negative));
}

#[test]
fn broken_traces_are_errors_with_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let header = "job_id,submit_s,duration_s,gpus,workload\n";
    let cases: [(&str, Vec<u8>, &[&str]); 9] = [
        ("no-column.csv", b"job_id,submit_s,gpus\na,1,1\n".to_vec(), &["line 1", "duration_s"]),
        (
            "unknown.csv",
            b"alpha,beta\n1,2\n".to_vec(),
            &["line 1", "no known kind", "job_id,submit_s"],
        ),
        (
            "negative.csv",
            format!("{header}a,1,2,1,x\nb,2,-5,1,x\n").into_bytes(),
            &["line 3", "negative"],
        ),
        ("before.csv", format!("{header}a,-1,2,1,x\n").into_bytes(), &["line 2", "negative"]),
        ("words.csv", format!("{header}a,soon,2,1,x\n").into_bytes(), &["line 2", "soon"]),
        ("short.csv", format!("{header}a,1\n").into_bytes(), &["line 2", "2 cells"]),
        ("nan.csv", format!("{header}a,1,NaN,1,x\n").into_bytes(), &["line 2", "NaN"]),
        ("binary.csv", [header.as_bytes(), &[0xff, 0xfe, b'\n']].concat(), &["line 2", "UTF-8"]),
        ("empty.csv", Vec::new(), &["no usable row"]),
    ];
    for (name, bytes, words) in cases {
        let e = error(&file(&dir, name, &bytes));
        for w in words {
            assert!(e.contains(w), "{name}: {e} should contain {w}");
        }
        assert!(e.contains(name), "{e}");
    }
    let mut long = gz(format!("{header}{}", "a,1,2,1,x\n".repeat(100_000)).as_bytes());
    long.truncate(long.len() / 2);
    let e = error(&file(&dir, "cut.csv.gz", &long));
    assert!(e.contains("truncated") && e.contains("line"), "{e}");
    assert!(error(Path::new("/nonexistent/trace.csv")).contains("/nonexistent/trace.csv"));
}

#[test]
fn few_rows_of_many_gpus_do_not_become_jobs_without_end() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!("job_id,submit_s,duration_s,gpus\n{}", "a,1,2,100000\n".repeat(51));
    let path = file(&dir, "wide.csv", text.as_bytes());
    assert_eq!(read_jobs(&path, None, MultiGpu::One).unwrap().jobs.len(), 51);
    let e = read_jobs(&path, None, MultiGpu::Split).unwrap_err().to_string();
    assert!(e.contains("wide.csv") && e.contains("drop"), "{e}");
}

#[test]
fn garbage_without_end_is_refused_in_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    // A bomb: gigabytes of one line behind a few megabytes of gzip.
    let path = dir.path().join("bomb.gz");
    let mut e = flate2::write::GzEncoder::new(
        std::fs::File::create(&path).unwrap(),
        flate2::Compression::fast(),
    );
    let block = vec![b'x'; 1 << 20];
    for _ in 0..256 {
        e.write_all(&block).unwrap();
    }
    e.finish().unwrap();
    let before = peak_kib();
    let text = error(&path);
    assert!(text.contains("line 1") && text.contains("longer"), "{text}");
    assert!(peak_kib() - before < 32 * 1024, "peak memory grew by {} KiB", peak_kib() - before);
}

/// Hundreds of megabytes of garbage of several kinds, through a pipe, as 10 GB would come: nothing is
/// read to the end and nothing is kept.
#[test]
fn garbage_through_a_pipe_is_refused_in_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let kinds: [(&str, &[u8], &[u8]); 5] = [
        ("noise", b"", b"\x00\x17garbage,\xff"),
        ("no-header", b"alpha,beta\n", b"1,2\n"),
        ("header", b"job_id,submit_s,duration_s,gpus,workload\na,1,2,1,x\n", b"\x01\x02\n"),
        ("string", b"[{\"jobid\":\"", b"xxxxxxxx"),
        ("attempts", b"[{\"attempts\":[", b"{},\n"),
    ];
    for (name, head, repeated) in kinds {
        let path = dir.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let to = path.clone();
        let block = repeated.repeat((1 << 20) / repeated.len());
        let writer = std::thread::spawn(move || {
            let mut pipe = std::fs::OpenOptions::new().write(true).open(to).unwrap();
            let mut sent = 0usize;
            // Ends with an error when the reader has had enough.
            if pipe.write_all(head).is_ok() {
                while sent < 300 && pipe.write_all(&block).is_ok() {
                    sent += 1;
                }
            }
            sent
        });
        let before = peak_kib();
        let text = error(&path);
        let sent = writer.join().unwrap();
        assert!(text.contains("line ") && text.contains(name), "{name}: {text}");
        assert!(sent < 64, "{name}: {sent} MB were read before the end: {text}");
        let grown = peak_kib() - before;
        assert!(grown < 96 * 1024, "{name}: peak memory grew by {grown} KiB");
    }
    let before = peak_kib();
    assert!(error(Path::new("/dev/zero")).contains("line 1"));
    assert!(peak_kib() - before < 32 * 1024);
}

fn peak_kib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn requests_of_every_kind_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let own = file(&dir, "own.csv", b"service,time_s,rate\na,0,1\na,60,3\nb,0,5\nb,60,5\n");
    let curves = read_requests(&own).unwrap();
    assert_eq!(curves.len(), 2);
    assert!((curves[0].at(60.0) - 2.0).abs() < 1e-9);
    assert!((curves[1].at(12345.0) - 5.0).abs() < 1e-9);
    let azure = file(&dir, "azure.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,1,1\n2023-11-16 18:17:04.03,1,1\n2023-11-16 18:18:04.03,1,1\n");
    let curves = read_requests(&azure).unwrap();
    assert_eq!(curves[0].rates.len(), 2);
    assert!((curves[0].rates[0] - 2.0 / 60.0).abs() < 1e-9);
    let servegen = file(
        &dir,
        "servegen.csv",
        b"client,timestamp,rate,cv,pat_name,pat_arg1,pat_arg2\n3,0,1.5,0,,0,0\n3,600,2.5,0,,0,0\n",
    );
    assert_eq!(read_requests(&servegen).unwrap()[0].name, "3");
    for (text, word) in [
        ("service,time_s,rate\na,0,-1\n", "line 2"),
        ("service,time_s,rate\na,0,1\na,60,1\na,180,1\n", "equally long"),
        ("when,what\n", "service,time_s,rate"),
    ] {
        let e = read_requests(&file(&dir, "bad.csv", text.as_bytes())).unwrap_err().to_string();
        assert!(e.contains(word), "{e}");
    }
}

#[test]
fn what_is_written_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let g = muxflow_sim::trace::GenerateJobs {
        jobs: 50,
        hours: 2.0,
        longest_s: 1e5,
        mean_s: None,
        seed: 4,
    };
    let jobs = muxflow_sim::trace::generate_jobs(&g).unwrap();
    let mut bytes = Vec::new();
    write_jobs(&jobs, &mut bytes).unwrap();
    let back = read_jobs(&file(&dir, "j.csv", &bytes), None, MultiGpu::One).unwrap();
    assert_eq!(back.jobs.len(), 50);
    assert!((back.jobs[49].duration_s - jobs[49].duration_s).abs() < 1e-3);
    let curve = muxflow_sim::trace::generate_requests("svc", 20.0, 190.0, 1, 9).unwrap();
    let mut bytes = Vec::new();
    write_requests(std::slice::from_ref(&curve), &mut bytes).unwrap();
    let back = read_requests(&file(&dir, "r.csv", &bytes)).unwrap();
    assert_eq!(back[0].rates.len(), 1440);
}

/// The public traces, where they are at hand.
#[test]
fn public_traces_are_read() {
    let root = std::env::var_os("MUXFLOW_SHARED_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    if !root.is_dir() {
        assert!(
            std::env::var_os("CI").is_none(),
            "CI needs the public traces at {}",
            root.display()
        );
        println!("SKIPPED: no public traces at {}; set MUXFLOW_SHARED_DATA", root.display());
        return;
    }
    let philly =
        read_jobs(&root.join("philly-pollux/philly.csv.gz"), Some("b436b2"), MultiGpu::One);
    assert_eq!(philly.unwrap().jobs.len(), 7423);
    let muri = read_jobs(&root.join("muri/testbed_trace.csv.gz"), None, MultiGpu::One).unwrap();
    assert_eq!((muri.kind, muri.jobs.len()), ("Muri", 400));
    let servegen = read_requests(&root.join("alibaba-servegen/language_m-small.csv.gz")).unwrap();
    assert_eq!(servegen.len(), 43);
    let azure =
        read_requests(&root.join("azure-llm-2023/AzureLLMInferenceTrace_code.csv.gz")).unwrap();
    let total: f64 = azure[0].rates.iter().map(|r| r * 60.0).sum();
    assert!((total - 8819.0).abs() < 0.5, "{total}");
}
