//! Each kind of model as header entries and tensors, and back with every index checked.

use serde_json::json;

use super::container::{Container, refuse};
use crate::error::PredictorError;
use crate::feature::{Column, NUMERIC, SideEncoder};
use crate::kernel_model::{Anchor, KernelModel, Shape, Side};
use crate::mlp::{Layer, Mlp};
use crate::model::{MlpModel, TreesModel};
use crate::trees::{Node, Trees};

fn flag(value: bool) -> f64 {
    f64::from(u8::from(value))
}

#[expect(clippy::cast_precision_loss, reason = "indices are far below 2^53")]
fn index(value: usize) -> f64 {
    value as f64
}

/// An index below `bound`, or a refusal.
fn checked(value: f64, bound: usize, what: &str) -> Result<usize, PredictorError> {
    if value.fract() == 0.0 && value >= 0.0 && value < index(bound) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in range")]
        Ok(value as usize)
    } else {
        Err(refuse(format!("{what} {value} does not exist; there are {bound}")))
    }
}

fn put_encoder(file: &mut Container, side: &str, encoder: &SideEncoder) {
    let columns = encoder
        .columns
        .iter()
        .flat_map(|c| [index(c.source), c.mean, c.deviation, flag(c.indicator)])
        .collect();
    file.put_f64(&format!("{side}.columns"), &[encoder.columns.len(), 4], columns);
    file.header.insert(format!("{side}_families"), json!(encoder.families));
}

fn encoder(file: &Container, side: &str) -> Result<SideEncoder, PredictorError> {
    let numbers = file.f64(&format!("{side}.columns"), &[None, Some(4)])?;
    let columns = numbers
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&[source, mean, deviation, indicator]| {
            if !(deviation > 0.0 && deviation.is_finite() && mean.is_finite()) {
                return Err(refuse(format!("{side}: a feature has deviation {deviation}")));
            }
            let source = checked(source, NUMERIC, "feature")?;
            Ok(Column { source, mean, deviation, indicator: indicator != 0.0 })
        })
        .collect::<Result<_, _>>()?;
    Ok(SideEncoder { columns, families: file.texts(&format!("{side}_families"))? })
}

pub(super) fn put_mlp(file: &mut Container, model: &MlpModel) {
    put_encoder(file, "online", &model.online);
    put_encoder(file, "offline", &model.offline);
    file.put_f64("trend", &[2], model.trend.to_vec());
    let layers = &model.net.layers;
    file.header.insert("layers".to_owned(), json!(layers.len()));
    for (number, layer) in layers.iter().enumerate() {
        let shape = [layer.inputs, layer.outputs];
        file.put_f32(&format!("layer{number}.weights"), &shape, layer.weights.clone());
        file.put_f32(&format!("layer{number}.biases"), &[layer.outputs], layer.biases.clone());
    }
}

pub(super) fn mlp(file: &Container) -> Result<MlpModel, PredictorError> {
    let (online, offline) = (encoder(file, "online")?, encoder(file, "offline")?);
    let count = usize::try_from(file.count("layers")?).unwrap_or(usize::MAX);
    if !(1..=64).contains(&count) {
        return Err(refuse(format!("a network of {count} layers is not between 1 and 64")));
    }
    let mut inputs = online.width() + offline.width();
    let mut layers = Vec::with_capacity(count);
    for number in 0..count {
        let outputs = if number + 1 == count { Some(1) } else { None };
        let weights = file.f32(&format!("layer{number}.weights"), &[Some(inputs), outputs])?;
        let biases = file.f32(&format!("layer{number}.biases"), &[outputs])?;
        let outputs = biases.len();
        if outputs == 0 || weights.len() != inputs * outputs {
            return Err(refuse(format!("layer {number}: weights and biases do not fit")));
        }
        let (weights, biases) = (weights.to_vec(), biases.to_vec());
        layers.push(Layer { inputs, outputs, weights, biases });
        inputs = outputs;
    }
    let trend = file.f64("trend", &[Some(2)])?;
    let trend = [trend[0], trend[1]];
    if !trend.iter().all(|t| t.is_finite()) {
        return Err(refuse(format!("the rule's weights are {trend:?}")));
    }
    Ok(MlpModel { online, offline, net: Mlp { layers }, trend })
}

pub(super) fn put_trees(file: &mut Container, model: &TreesModel) {
    put_encoder(file, "online", &model.online);
    put_encoder(file, "offline", &model.offline);
    file.put_f64("trend", &[2], model.trend.to_vec());
    let trees = &model.trees;
    file.put_f64("base", &[2], vec![trees.base, index(trees.width)]);
    let sizes: Vec<f64> = trees.trees.iter().map(|tree| index(tree.len())).collect();
    file.put_f64("tree_sizes", &[sizes.len()], sizes);
    let nodes: Vec<f64> = trees
        .trees
        .iter()
        .flatten()
        .flat_map(|n| {
            let feature = n.feature.map_or(-1.0, f64::from);
            [feature, n.threshold, flag(n.missing_left), f64::from(n.left), n.value]
        })
        .collect();
    file.put_f64("nodes", &[nodes.len() / 5, 5], nodes);
}

pub(super) fn trees(file: &Container) -> Result<TreesModel, PredictorError> {
    let (online, offline) = (encoder(file, "online")?, encoder(file, "offline")?);
    let trend = file.f64("trend", &[Some(2)])?;
    let base = file.f64("base", &[Some(2)])?;
    let width = online.columns.len() + online.families.len() + offline.columns.len();
    let width = width + offline.families.len() + 2;
    if base[1] != index(width) {
        return Err(refuse(format!("the trees look at {} features, not at {width}", base[1])));
    }
    let mut nodes = file.f64("nodes", &[None, Some(5)])?.as_chunks::<5>().0;
    let mut trees = Vec::new();
    for size in file.f64("tree_sizes", &[None])? {
        let size = checked(*size, nodes.len() + 1, "node")?;
        let (own, rest) = nodes.split_at(size);
        nodes = rest;
        trees.push(tree(own, width)?);
    }
    let trees = Trees { width, base: base[0], trees };
    Ok(TreesModel { online, offline, trend: [trend[0], trend[1]], trees })
}

fn tree(nodes: &[[f64; 5]], width: usize) -> Result<Vec<Node>, PredictorError> {
    if nodes.is_empty() {
        return Err(refuse("a tree has no root"));
    }
    let mut out = Vec::with_capacity(nodes.len());
    for (at, &[feature, threshold, missing_left, left, value]) in nodes.iter().enumerate() {
        let left = checked(left, nodes.len(), "node")?;
        let feature = if feature < 0.0 {
            None
        } else {
            // Children come later, so every walk ends.
            if left <= at || left + 1 >= nodes.len() {
                return Err(refuse(format!("node {at} of a tree has no children at {left}")));
            }
            u32::try_from(checked(feature, width, "feature")?).ok()
        };
        if !value.is_finite() {
            return Err(refuse(format!("node {at} of a tree has the value {value}")));
        }
        let left = u32::try_from(left).unwrap_or(0);
        out.push(Node { feature, threshold, missing_left: missing_left != 0.0, left, value });
    }
    Ok(out)
}

fn put_side(file: &mut Container, name: &str, side: &Side) {
    put_encoder(file, name, &side.encoder);
    file.header.insert(format!("{name}_workloads"), json!(side.workloads));
    file.header.insert(format!("{name}_known_families"), json!(side.families));
    let width = side.encoder.numeric_width();
    let rows = side.anchors.iter().flat_map(|a| a.row.iter().copied()).collect();
    file.put_f64(&format!("{name}.anchors"), &[side.anchors.len(), width], rows);
    let id = |id: Option<u32>| id.map_or(-1.0, f64::from);
    let ids = side.anchors.iter().flat_map(|a| [id(a.workload), id(a.family)]).collect();
    file.put_f64(&format!("{name}.ids"), &[side.anchors.len(), 2], ids);
    file.put_f64(&format!("{name}.weights"), &[side.weights.len()], side.weights.clone());
}

fn side(file: &Container, name: &str) -> Result<Side, PredictorError> {
    let encoder = encoder(file, name)?;
    let sorted = |key: String| {
        let names = file.texts(&key)?;
        if names.is_sorted() { Ok(names) } else { Err(refuse(format!("`{key}` is not sorted"))) }
    };
    let workloads = sorted(format!("{name}_workloads"))?;
    let families = sorted(format!("{name}_known_families"))?;
    let width = encoder.numeric_width();
    let weights = file.f64(&format!("{name}.weights"), &[None])?.to_vec();
    let rows = file.f64(&format!("{name}.anchors"), &[Some(weights.len()), Some(width)])?;
    let ids = file.f64(&format!("{name}.ids"), &[Some(weights.len()), Some(2)])?;
    let id = |value: f64, bound: usize| {
        if value < 0.0 {
            return Ok(None);
        }
        Ok::<_, PredictorError>(u32::try_from(checked(value, bound, "workload")?).ok())
    };
    let anchors = ids
        .as_chunks::<2>()
        .0
        .iter()
        .enumerate()
        .map(|(at, &[workload, family])| {
            Ok(Anchor {
                row: rows[at * width..(at + 1) * width].to_vec(),
                workload: id(workload, workloads.len())?,
                family: id(family, families.len())?,
            })
        })
        .collect::<Result<_, PredictorError>>()?;
    Ok(Side { encoder, workloads, families, anchors, weights })
}

pub(super) fn put_kernel(file: &mut Container, model: &KernelModel) {
    put_side(file, "online", &model.online);
    put_side(file, "offline", &model.offline);
    let s = &model.shape;
    let [p0, p1, p2] = s.product_parts;
    let shape =
        vec![s.workload, s.family, s.family_near, s.near, s.product, p0, p1, p2, s.noise, s.reach];
    file.put_f64("shape", &[10], shape);
    file.put_f64("trend", &[2], model.trend.to_vec());
    file.put_f64("range", &[2], model.range.to_vec());
    let landmarks = model.landmarks.iter().map(|&at| index(at)).collect();
    file.put_f64("landmarks", &[model.landmarks.len()], landmarks);
    let shape = [model.online.anchors.len(), model.landmarks.len()];
    file.put_f64("product", &shape, model.product.clone());
}

pub(super) fn kernel(file: &Container) -> Result<KernelModel, PredictorError> {
    let (online, offline) = (side(file, "online")?, side(file, "offline")?);
    let &[workload, family, family_near, near, product, p0, p1, p2, noise, reach] =
        file.f64("shape", &[Some(10)])?
    else {
        return Err(refuse("the kernel has no shape"));
    };
    let product_parts = [p0, p1, p2];
    let shape = Shape { workload, family, family_near, near, product, product_parts, noise, reach };
    if !(reach > 0.0 && reach.is_finite()) {
        return Err(refuse(format!("the kernel's reach is {reach}")));
    }
    let range = file.f64("range", &[Some(2)])?;
    if !(0.0 <= range[0] && range[0] <= range[1] && range[1] <= 1.0) {
        return Err(refuse(format!("the range of speeds {range:?} is not within 0 to 1")));
    }
    let trend = file.f64("trend", &[Some(2)])?;
    let landmarks = file
        .f64("landmarks", &[None])?
        .iter()
        .map(|&at| checked(at, offline.anchors.len(), "landmark"))
        .collect::<Result<Vec<_>, _>>()?;
    let rows = [Some(online.anchors.len()), Some(landmarks.len())];
    let product = file.f64("product", &rows)?.to_vec();
    let finite = [&product, &online.weights, &offline.weights];
    if !finite.iter().all(|list| list.iter().all(|v| v.is_finite())) {
        return Err(refuse("the kernel has weights that are not finite"));
    }
    let (trend, range) = ([trend[0], trend[1]], [range[0], range[1]]);
    Ok(KernelModel { shape, online, offline, landmarks, product, trend, range })
}
