//! Models with their lineage: all are kept, one per GPU type is in use.

use muxflow_types::{GpuType, Micros};
use rusqlite::{OptionalExtension, Row, params};

use crate::Store;
use crate::error::StoreError;

/// The number of a model in one store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub i64);

/// A model to keep.
#[derive(Debug, Clone, PartialEq)]
pub struct NewModel<'a> {
    /// For which GPU type.
    pub gpu_type: &'a GpuType,
    /// Its kind, as the predictor names it.
    pub kind: &'a str,
    /// The model file.
    pub bytes: &'a [u8],
    /// The model file's own checksum.
    pub checksum: &'a str,
    /// The model card.
    pub card: &'a str,
    /// Its error on workloads left out.
    pub unseen_error: f64,
    /// The model that was in use when it was trained.
    pub parent: Option<ModelId>,
    /// When.
    pub created_at: Micros,
}

/// A model as it is kept.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelRow {
    /// Its number.
    pub id: ModelId,
    /// For which GPU type.
    pub gpu_type: GpuType,
    /// Its kind.
    pub kind: String,
    /// The model file.
    pub bytes: Vec<u8>,
    /// Its checksum.
    pub checksum: String,
    /// The model card.
    pub card: String,
    /// Its error on workloads left out.
    pub unseen_error: f64,
    /// The model that was in use when it was trained.
    pub parent: Option<ModelId>,
    /// When.
    pub created_at: Micros,
    /// Whether the scheduler uses it.
    pub in_use: bool,
}

const COLUMNS: &str =
    "id, gpu_type, kind, bytes, checksum, card, unseen_error, parent, created_at_us, in_use";

fn read_model(row: &Row<'_>) -> rusqlite::Result<Result<ModelRow, String>> {
    let gpu_type: String = row.get(1)?;
    let created: i64 = row.get(8)?;
    let gpu_type = match GpuType::new(&gpu_type) {
        Ok(gpu_type) => gpu_type,
        Err(error) => return Ok(Err(error.to_string())),
    };
    Ok(Ok(ModelRow {
        id: ModelId(row.get(0)?),
        gpu_type,
        kind: row.get(2)?,
        bytes: row.get(3)?,
        checksum: row.get(4)?,
        card: row.get(5)?,
        unseen_error: row.get(6)?,
        parent: row.get::<_, Option<i64>>(7)?.map(ModelId),
        created_at: Micros(u64::try_from(created).unwrap_or(0)),
        in_use: row.get(9)?,
    }))
}

impl Store {
    /// Keeps a model; with `in_use` it takes the place of the one in use, in the same transaction.
    pub fn put_model(&mut self, model: &NewModel<'_>, in_use: bool) -> Result<ModelId, StoreError> {
        let mut run = || {
            let transaction = self
                .connection
                .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
            if in_use {
                transaction.execute(
                    "UPDATE models SET in_use = 0 WHERE gpu_type = ?1 AND in_use = 1",
                    [model.gpu_type.as_str()],
                )?;
            }
            transaction.execute(
                "INSERT INTO models (gpu_type, kind, bytes, checksum, card, unseen_error, parent,
                 created_at_us, in_use) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                params![
                    model.gpu_type.as_str(),
                    model.kind,
                    model.bytes,
                    model.checksum,
                    model.card,
                    model.unseen_error,
                    model.parent.map(|id| id.0),
                    i64::try_from(model.created_at.0).unwrap_or(i64::MAX),
                    in_use,
                ],
            )?;
            let id = ModelId(transaction.last_insert_rowid());
            transaction.commit()?;
            Ok(id)
        };
        let result = run();
        result.map_err(|error| self.error("write a model to", error))
    }

    /// Takes an older model back into use.
    pub fn use_model(&mut self, id: ModelId) -> Result<(), StoreError> {
        let mut run = || {
            let transaction = self
                .connection
                .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
            transaction.execute(
                "UPDATE models SET in_use = 0
                 WHERE gpu_type = (SELECT gpu_type FROM models WHERE id = ?1)",
                [id.0],
            )?;
            let changed =
                transaction.execute("UPDATE models SET in_use = 1 WHERE id = ?1", [id.0])?;
            transaction.commit()?;
            Ok(changed)
        };
        let result: rusqlite::Result<usize> = run();
        match result {
            Ok(0) => Err(StoreError::NoModel { path: self.path.clone(), id: id.0 }),
            Ok(_) => Ok(()),
            Err(error) => Err(self.error("change the model in", error)),
        }
    }

    /// The model in use for a GPU type.
    pub fn model_in_use(&self, gpu_type: &GpuType) -> Result<Option<ModelRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM models WHERE gpu_type = ?1 AND in_use = 1");
        let row = self
            .connection
            .query_row(&sql, [gpu_type.as_str()], read_model)
            .optional()
            .map_err(|error| self.error("read a model from", error))?;
        row.transpose().map_err(|detail| self.bad_model(detail))
    }

    /// All models, oldest first.
    pub fn models(&self) -> Result<Vec<ModelRow>, StoreError> {
        let failed = |error| self.error("read the models from", error);
        let mut statement = self
            .connection
            .prepare(&format!("SELECT {COLUMNS} FROM models ORDER BY id"))
            .map_err(failed)?;
        let rows = statement.query_map([], read_model).map_err(failed)?;
        rows.map(|row| row.map_err(failed)?.map_err(|detail| self.bad_model(detail))).collect()
    }

    fn bad_model(&self, detail: String) -> StoreError {
        StoreError::Row { path: self.path.clone(), what: "a model".to_owned(), detail }
    }
}
