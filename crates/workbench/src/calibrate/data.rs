//! Reads the public measurements.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

/// Where the public data lies: `MUXFLOW_SHARED_DATA`, or beside the repository.
pub(crate) fn root() -> anyhow::Result<PathBuf> {
    let path = match std::env::var_os("MUXFLOW_SHARED_DATA") {
        Some(p) => PathBuf::from(p),
        None => crate::root().join("../shared/data"),
    };
    ensure!(
        path.is_dir(),
        "no public measurements at {}; set MUXFLOW_SHARED_DATA to the folder that holds miso, muxserve, gavel and parvagpu",
        path.display()
    );
    Ok(path)
}

fn gunzip(path: &Path) -> anyhow::Result<Vec<u8>> {
    let file = std::fs::File::open(path).with_context(|| format!("open {}", path.display()))?;
    let mut out = Vec::new();
    flate2::read::GzDecoder::new(file)
        .read_to_end(&mut out)
        .with_context(|| format!("unpack {}", path.display()))?;
    Ok(out)
}

fn json(path: &Path) -> anyhow::Result<serde_json::Value> {
    serde_json::from_slice(&gunzip(path)?).with_context(|| format!("read {}", path.display()))
}

/// One MuxServe curve: latency at each SM percentage.
#[derive(Debug, Clone)]
pub(crate) struct ShareCurve {
    /// (SM share 0 to 1, speed against 100 %).
    pub(crate) points: Vec<(f64, f64)>,
}

/// MuxServe: prefill and decode curves of one GPU per model where there is one.
pub(crate) fn muxserve(root: &Path) -> anyhow::Result<Vec<ShareCurve>> {
    let data = json(&root.join("muxserve/llama.json.gz"))?;
    let mut out = Vec::new();
    for by_tp in data.as_object().context("muxserve: not an object")?.values() {
        // The fewest GPUs that the model was measured on: least communication in the figure.
        let (_, by_sm) = by_tp
            .as_object()
            .context("muxserve: no TP level")?
            .iter()
            .min_by_key(|(tp, _)| tp.parse::<u32>().unwrap_or(u32::MAX))
            .context("muxserve: empty model")?;
        let full = by_sm["100"].as_object().context("muxserve: no 100 % level")?;
        for (batch, by_len) in full {
            for len in by_len.as_object().context("muxserve: no length level")?.keys() {
                for phase in ["prefill", "decoding"] {
                    let mut points = Vec::new();
                    let Some(base) = by_sm["100"][batch][len][phase].as_f64() else { continue };
                    for sm in ["30", "40", "50", "60", "70", "80", "90", "100"] {
                        if let Some(t) = by_sm[sm][batch][len][phase].as_f64()
                            && t > 0.0
                        {
                            points.push((sm.parse::<f64>()? / 100.0, base / t));
                        }
                    }
                    if points.len() == 8 {
                        out.push(ShareCurve { points });
                    }
                }
            }
        }
    }
    Ok(out)
}

/// One ParvaGPU row: throughput of each of `processes` equal processes on a slice.
#[derive(Debug, Clone)]
pub(crate) struct SliceRow {
    pub(crate) gpcs: u32,
    pub(crate) processes: u32,
    pub(crate) throughput: f64,
}

/// ParvaGPU: rows by model and batch.
pub(crate) fn parvagpu(root: &Path) -> anyhow::Result<BTreeMap<(String, u32), Vec<SliceRow>>> {
    let mut out: BTreeMap<(String, u32), Vec<SliceRow>> = BTreeMap::new();
    let folder = root.join("parvagpu");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .with_context(|| format!("list {}", folder.display()))?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "csv"))
        .collect();
    files.sort();
    for path in files {
        let model = path.file_stem().and_then(|s| s.to_str()).unwrap_or("?").to_owned();
        let text = std::fs::read_to_string(&path)?;
        for (number, line) in text.lines().enumerate().skip(1) {
            let cells: Vec<&str> = line.split(',').collect();
            ensure!(cells.len() == 5, "{} line {}: want 5 cells", path.display(), number + 1);
            let throughput: f64 = cells[3].parse()?;
            if throughput > 0.0 {
                out.entry((model.clone(), cells[1].parse()?)).or_default().push(SliceRow {
                    gpcs: cells[0].parse()?,
                    processes: cells[2].parse()?,
                    throughput,
                });
            }
        }
    }
    Ok(out)
}

/// One MISO mix: class of each of seven jobs, and speed by level (100, 50, 14 %).
#[derive(Debug, Clone)]
pub(crate) struct Mix {
    pub(crate) classes: Vec<usize>,
    pub(crate) speeds: Vec<[f64; 3]>,
}

/// MISO: the distinct curves on 7, 4 and 3 GPCs (one class each), and the distinct mixes.
pub(crate) fn miso(root: &Path) -> anyhow::Result<(Vec<[f64; 3]>, Vec<Mix>)> {
    let mps = npy(&gunzip(&root.join("miso/mps_speed_input.npy.gz"))?)?;
    let mig = npy(&gunzip(&root.join("miso/mig_speed_target.npy.gz"))?)?;
    ensure!(mps.len() == mig.len() && mps.len() % 21 == 0, "miso: the two arrays do not match");
    let mut classes: BTreeMap<[i64; 3], usize> = BTreeMap::new();
    let mut curves = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    let mut mixes = Vec::new();
    for row in 0..mps.len() / 21 {
        let column = |data: &[f64], job: usize| {
            [data[row * 21 + job], data[row * 21 + 7 + job], data[row * 21 + 14 + job]]
        };
        #[expect(clippy::cast_possible_truncation, reason = "speeds between 0 and 1")]
        let key = |v: [f64; 3]| v.map(|x| (x * 1e4).round() as i64);
        let mut jobs: Vec<([i64; 3], [f64; 3], [f64; 3])> =
            (0..7).map(|j| (key(column(&mig, j)), column(&mps, j), column(&mig, j))).collect();
        jobs.sort_by_key(|j| (j.0, key(j.1)));
        if !seen.insert(jobs.iter().map(|j| (j.0, key(j.1))).collect::<Vec<_>>()) {
            continue;
        }
        let mut mix = Mix { classes: Vec::new(), speeds: Vec::new() };
        for (k, speed, curve) in jobs {
            let next = classes.len();
            let class = *classes.entry(k).or_insert_with(|| {
                curves.push(curve);
                next
            });
            mix.classes.push(class);
            mix.speeds.push(speed);
        }
        mixes.push(mix);
    }
    Ok((curves, mixes))
}

fn npy(bytes: &[u8]) -> anyhow::Result<Vec<f64>> {
    ensure!(bytes.len() > 10 && bytes.starts_with(b"\x93NUMPY"), "not a .npy file");
    let header = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let text = String::from_utf8_lossy(&bytes[10..10 + header]).into_owned();
    if !text.contains("'<f8'") || !text.contains("'fortran_order': False") {
        bail!("the .npy file is not an array of little-endian doubles in C order: {text}");
    }
    Ok(bytes[10 + header..]
        .chunks_exact(8)
        .map(|c| f64::from_le_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]))
        .collect())
}

/// One Gavel pair: two job types and what each keeps of its solo speed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TrainingPair {
    pub(crate) jobs: [usize; 2],
    pub(crate) speeds: [f64; 2],
}

/// Gavel: job types and unordered single-GPU pairs of one GPU type.
pub(crate) fn gavel(root: &Path, gpu: &str) -> anyhow::Result<(Vec<String>, Vec<TrainingPair>)> {
    let data = json(&root.join("gavel/simulation_throughputs.json.gz"))?;
    let table = data[gpu].as_object().with_context(|| format!("gavel: no GPU type {gpu}"))?;
    let names: Vec<&String> = table.keys().filter(|k| k.ends_with(", 1)")).collect();
    let mut pairs = Vec::new();
    for (i, a) in names.iter().enumerate() {
        for (j, b) in names.iter().enumerate().skip(i) {
            let both = &table[*a][b.as_str()];
            let speeds = [
                both[0].as_f64().unwrap_or(0.0) / table[*a]["null"].as_f64().unwrap_or(0.0),
                both[1].as_f64().unwrap_or(0.0) / table[*b]["null"].as_f64().unwrap_or(0.0),
            ];
            if speeds.iter().all(|s| s.is_finite() && *s > 0.0) {
                pairs.push(TrainingPair { jobs: [i, j], speeds });
            }
        }
    }
    Ok((names.into_iter().cloned().collect(), pairs))
}
