//! `muxflow match` on real files, good and bad.

use std::path::Path;
use std::process::{Command, Output};

fn run(args: &[&str], file: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_muxflow"))
        .arg("match")
        .arg(file)
        .args(args)
        .output()
        .expect("muxflow starts")
}

fn write(dir: &Path, name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).expect("the file is written");
    path
}

fn npy(rows: usize, cols: usize, data: &[f32]) -> Vec<u8> {
    let header =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {cols}), }}\n");
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend(u16::try_from(header.len()).expect("short").to_le_bytes());
    out.extend(header.as_bytes());
    out.extend(data.iter().flat_map(|x| x.to_le_bytes()));
    out
}

fn json(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON on standard output")
}

#[test]
fn the_paper_s_example_in_both_formats_and_both_directions() {
    let dir = tempfile::tempdir().unwrap();
    let csv = write(dir.path(), "w.csv", b"0.3,0.8,0.2\n0.8,0.1,0.4\n");
    let found = json(&run(&["--json"], &csv));
    assert_eq!(found["value"], 1.6);
    assert_eq!(found["assignment"], serde_json::json!([1, 0]));
    assert_eq!(found["certificate"]["verified"], true);
    // The same, turned: the tall file gives the same edges.
    let tall = write(dir.path(), "t.npy", &npy(3, 2, &[0.3, 0.8, 0.8, 0.1, 0.2, 0.4]));
    let found = json(&run(&["--json"], &tall));
    assert_eq!(found["assignment"], serde_json::json!([1, 0, null]));
    assert_eq!(found["certificate"]["exact"], true);
    let least = json(&run(&["--json", "--minimize"], &csv));
    assert_eq!(least["assignment"], serde_json::json!([2, 1]));
    let text = String::from_utf8(run(&[], &csv).stdout).unwrap();
    assert!(text.contains("value        1.6"), "{text}");
    assert!(text.contains("certificate  verified"), "{text}");
    assert!(text.contains("\n0 1 0.8\n1 0 0.8\n"), "{text}");
}

#[test]
fn forbidden_and_optional_edges() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "w.npy", &npy(2, 2, &[-1.0, 9.0, 5.0, 8.0]));
    assert_eq!(json(&run(&["--json"], &file))["value"], 14.0);
    let forbid = json(&run(&["--json", "--forbid", "9"], &file));
    assert_eq!((&forbid["value"], &forbid["matched"]), (&7.0.into(), &2.into()));
    let optional = json(&run(&["--json", "--forbid", "9", "--optional"], &file));
    assert_eq!(optional["assignment"], serde_json::json!([null, 1]));
    let negative = json(&run(&["--json", "--forbid", "-1"], &file));
    assert_eq!(negative["value"], 14.0);
    let infinite = write(dir.path(), "i.npy", &npy(2, 2, &[1.0, f32::NEG_INFINITY, 5.0, 8.0]));
    let without = json(&run(&["--json", "--forbid", "-inf"], &infinite));
    assert_eq!((&without["value"], &without["matched"]), (&9.0.into(), &2.into()));
}

#[test]
fn bad_files_are_refused_by_name_place_and_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&str, Vec<u8>, &[&str]); 7] = [
        ("ragged.csv", b"1,2\n3\n".to_vec(), &["ragged.csv", "line 2", "every line needs"]),
        ("text.csv", b"1,2\n3,four\n".to_vec(), &["line 2, column 2", "`four`"]),
        ("nan.csv", b"1,2\nnan,3\n".to_vec(), &["line 2, column 1", "--forbid nan"]),
        (
            "nan.npy",
            npy(3, 2, &[0.0, 1.0, 2.0, f32::NAN, 4.0, 5.0]),
            &["nan.npy", "row 1, column 1", "--forbid=NaN"],
        ),
        ("inf.npy", npy(1, 2, &[0.0, f32::INFINITY]), &["row 0, column 1", "--forbid=inf"]),
        ("short.npy", npy(2, 2, &[0.0, 1.0]), &["short.npy", "8 bytes early"]),
        ("weights.txt", b"1 2".to_vec(), &[".npy or .csv", "numpy.save"]),
    ];
    for (name, bytes, wanted) in cases {
        let output = run(&[], &write(dir.path(), name, &bytes));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{name} is accepted");
        assert!(output.stdout.is_empty(), "{name} prints a result");
        for part in wanted {
            assert!(said.contains(part), "{name}: `{part}` is missing in: {said}");
        }
    }
    let missing = run(&[], &dir.path().join("absent.npy"));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("absent.npy"));
    // What the remedy says helps.
    let nan = write(dir.path(), "n.npy", &npy(1, 2, &[f32::NAN, 2.0]));
    assert_eq!(json(&run(&["--json", "--forbid=NaN"], &nan))["value"], 2.0);
}
