//! What the commands about speed models share: where samples come from, cards, pictures, files.

pub(crate) mod card;
pub(crate) mod chart;
pub(crate) mod files;
pub(crate) mod source;
