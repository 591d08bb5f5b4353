//! Uniform, cluster-like and replicated weights.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

/// What the weights are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Independent and uniform in [0, 1).
    Uniform,
    /// Replicas of 50 services and 20 job families with noise.
    Cluster,
    /// The same without noise: many rows and columns are equal.
    Replicas,
    /// Noise on the services only: many columns are equal.
    HalfReplicas,
}

impl Kind {
    /// By its name on the command line.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "uniform" => Self::Uniform,
            "cluster" => Self::Cluster,
            "replicas" => Self::Replicas,
            "half-replicas" => Self::HalfReplicas,
            _ => return None,
        })
    }

    /// Noise on services and on jobs, where there are any.
    pub fn noise(self) -> Option<(f32, f32)> {
        match self {
            Self::Uniform => None,
            Self::Cluster => Some((0.02, 0.05)),
            Self::HalfReplicas => Some((0.02, 0.0)),
            Self::Replicas => Some((0.0, 0.0)),
        }
    }
}

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xa076_1d64_78bd_642f))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1) on a grid of 2^-24.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f32 {
        let (a, b) = (self.unit().max(1e-7), self.unit());
        (-2.0 * a.ln()).sqrt() * (std::f32::consts::TAU * b).cos()
    }
}

const HIDDEN: usize = 64;

/// A random network 11-64-64-1 with ReLU, the speed of an offline job beside an online service.
struct Network {
    first: Vec<[f32; HIDDEN]>,
    first_bias: [f32; HIDDEN],
    second: Vec<[f32; HIDDEN]>,
    second_bias: [f32; HIDDEN],
    last: [f32; HIDDEN],
}

impl Network {
    fn new(random: &mut Random) -> Self {
        let mut layer = |inputs: usize| -> Vec<[f32; HIDDEN]> {
            let scale = (2.0 / inputs as f32).sqrt();
            (0..inputs).map(|_| std::array::from_fn(|_| random.normal() * scale)).collect()
        };
        let (first, second) = (layer(11), layer(HIDDEN));
        let (b1, b2, last) = (layer(1), layer(1), layer(1));
        let last = last[0].map(|x| x / (HIDDEN as f32).sqrt() * 1.4);
        Self {
            first,
            first_bias: b1[0].map(|x| x * 0.1),
            second,
            second_bias: b2[0].map(|x| x * 0.1),
            last,
        }
    }

    /// The part of the first layer that some of the inputs make.
    fn part(&self, inputs: &[(usize, f32)]) -> [f32; HIDDEN] {
        let mut out = [0.0; HIDDEN];
        for &(at, x) in inputs {
            for k in 0..HIDDEN {
                out[k] += self.first[at][k] * x;
            }
        }
        out
    }

    /// One row of speeds: `online` and the share are in `row`, the jobs in `jobs`, 8 at a time.
    fn row(&self, row: &[f32; HIDDEN], jobs: &[[f32; HIDDEN]], out: &mut [f32]) {
        for (jobs, out) in jobs.chunks(8).zip(out.chunks_mut(8)) {
            let mut input = [[0f32; 8]; HIDDEN];
            for (lane, job) in jobs.iter().enumerate() {
                for k in 0..HIDDEN {
                    input[k][lane] = (row[k] + job[k] + self.first_bias[k]).max(0.0);
                }
            }
            let mut sum = [0f32; 8];
            for to in (0..HIDDEN).step_by(4) {
                let mut acc: [[f32; 8]; 4] = std::array::from_fn(|t| [self.second_bias[to + t]; 8]);
                for from in 0..HIDDEN {
                    for t in 0..4 {
                        let w = self.second[from][to + t];
                        for lane in 0..8 {
                            acc[t][lane] += input[from][lane] * w;
                        }
                    }
                }
                for t in 0..4 {
                    for lane in 0..8 {
                        sum[lane] += acc[t][lane].max(0.0) * self.last[to + t];
                    }
                }
            }
            for (out, sum) in out.iter_mut().zip(sum) {
                *out = grid(1.0 / (1.0 + (-sum).exp()));
            }
        }
    }
}

/// Down to the grid of 2^-24.
fn grid(x: f32) -> f32 {
    (x * 16_777_216.0).floor() / 16_777_216.0
}

/// Row and column features as they enter the network.
pub struct Cluster {
    network: Network,
    services: Vec<[f32; 5]>,
    noise: (f32, f32),
    random: Random,
    rows: Vec<[f32; HIDDEN]>,
    jobs: Vec<[f32; HIDDEN]>,
}

impl Cluster {
    /// `rows` online GPUs and `cols` offline jobs with the given noise.
    pub fn new(rows: usize, cols: usize, noise: (f32, f32), seed: u64) -> Self {
        let mut random = Random::new(seed);
        let network = Network::new(&mut random);
        let mut features = |count: usize| -> Vec<[f32; 5]> {
            (0..count).map(|_| std::array::from_fn(|_| random.unit())).collect()
        };
        let (services, families) = (features(50), features(20));
        let (rows_wanted, jobs_wanted) = (rows, cols);
        let (rows, jobs) = (Vec::new(), Vec::new());
        let mut cluster = Self { network, services, noise, random, rows, jobs };
        cluster.rows = (0..rows_wanted).map(|_| cluster.online()).collect();
        cluster.jobs = (0..jobs_wanted).map(|_| cluster.offline(&families)).collect();
        cluster
    }

    /// One more online GPU: a service by Zipf's law, and what it leaves.
    fn online(&mut self) -> [f32; HIDDEN] {
        let zipf = |k: usize| (k as f32 + 1.0).powf(-0.7);
        let mut u = self.random.unit() * (0..50).map(zipf).sum::<f32>();
        let service = (0..50).find(|&k| {
            u -= zipf(k);
            u < 0.0
        });
        let mut x = self.services[service.unwrap_or(0)];
        for x in &mut x {
            *x = (*x + self.noise.0 * self.random.normal()).clamp(0.0, 1.0);
        }
        // The share left over: what the busier of two features does not take, in tenths.
        let share = ((1.0 - 0.5 * (x[0] + x[1])) * 10.0).floor().clamp(1.0, 9.0) / 10.0;
        let inputs: Vec<(usize, f32)> = x.into_iter().enumerate().chain([(10, share)]).collect();
        self.network.part(&inputs)
    }

    fn offline(&mut self, families: &[[f32; 5]]) -> [f32; HIDDEN] {
        let mut x = families[(self.random.bits() % 20) as usize];
        for x in &mut x {
            *x = (*x + self.noise.1 * self.random.normal()).clamp(0.0, 1.0);
        }
        let inputs: Vec<(usize, f32)> = x.iter().enumerate().map(|(k, &x)| (5 + k, x)).collect();
        self.network.part(&inputs)
    }

    /// Replaces one row by a new one.
    pub fn change_row(&mut self, row: usize) {
        self.rows[row] = self.online();
    }

    /// Writes one row.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the features were asked for in the line above.
            unsafe { fast_row(&self.network, &self.rows[row], &self.jobs, out) };
            return;
        }
        self.network.row(&self.rows[row], &self.jobs, out);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fast_row(network: &Network, row: &[f32; HIDDEN], jobs: &[[f32; HIDDEN]], out: &mut [f32]) {
    network.row(row, jobs, out);
}

/// The matrix of this name, made with two threads.
pub fn make(kind: Kind, rows: usize, cols: usize, seed: u64) -> Vec<f32> {
    let mut data = vec![0f32; rows * cols];
    let Some(noise) = kind.noise() else {
        for (r, line) in data.chunks_mut(cols.max(1)).enumerate() {
            let mut random = Random::new(seed ^ ((r as u64) << 20));
            line.iter_mut().for_each(|x| *x = random.unit());
        }
        return data;
    };
    let cluster = Cluster::new(rows, cols, noise, seed);
    let half = rows.div_ceil(2);
    std::thread::scope(|scope| {
        for (part, chunk) in data.chunks_mut((half * cols).max(1)).enumerate() {
            let cluster = &cluster;
            scope.spawn(move || {
                for (r, line) in chunk.chunks_mut(cols).enumerate() {
                    cluster.row(part * half + r, line);
                }
            });
        }
    });
    data
}

/// Reads the matrix from `path`, or makes it and writes it there.
pub fn load(
    path: &Path,
    kind: Kind,
    rows: usize,
    cols: usize,
    seed: u64,
) -> std::io::Result<Vec<f32>> {
    let mut data = vec![0f32; rows * cols];
    if let Ok(mut file) = File::open(path) {
        // SAFETY: any bytes are valid f32s, and the slice covers exactly the vector's memory.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(data.as_mut_ptr().cast::<u8>(), data.len() * 4)
        };
        file.read_exact(bytes)?;
        return Ok(data);
    }
    drop(data);
    let data = make(kind, rows, cols, seed);
    // SAFETY: f32s have no padding, and the slice covers exactly the vector's memory.
    let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), data.len() * 4) };
    let partial = path.with_extension("partial");
    File::create(&partial)?.write_all(bytes)?;
    std::fs::rename(&partial, path)?;
    Ok(data)
}
