//! Who calls, and whom a job may run as.

use std::collections::BTreeMap;

use muxflow_agent::sys;

/// May act for everybody: root, and the user that the manager runs as.
pub fn is_operator(uid: u32) -> bool {
    uid == 0 || uid == sys::own_uid()
}

/// Who calls the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// The user's primary group.
    pub gid: u32,
    /// The user's name.
    pub name: String,
}

impl Caller {
    /// The user of this number, known to the system or not.
    pub fn of_uid(uid: u32, gid: Option<u32>) -> Self {
        match sys::user_by_id(uid) {
            Some(user) => Caller { uid, gid: user.gid, name: user.name },
            None => Caller { uid, gid: gid.unwrap_or(uid), name: uid.to_string() },
        }
    }

    /// The user of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        let (uid, gid) = muxflow_agent::config::parse_user(name)?;
        let name = sys::user_by_id(uid).map_or_else(|| name.to_owned(), |user| user.name);
        Some(Caller { uid, gid, name })
    }

    /// May act for everybody.
    pub fn is_operator(&self) -> bool {
        is_operator(self.uid)
    }

    /// May see and change what belongs to this user.
    pub fn may_act_for(&self, uid: u32) -> bool {
        self.uid == uid || self.is_operator()
    }
}

/// Tokens, each with the user that it stands for.
#[derive(Debug, Clone, Default)]
pub struct Tokens(BTreeMap<String, Caller>);

impl Tokens {
    /// Adds one.
    pub fn insert(&mut self, token: String, caller: Caller) {
        self.0.insert(token, caller);
    }

    /// There is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The user of a token. Every token is compared whole, so that the time taken tells nothing
    /// about how much of it was right.
    pub fn find(&self, given: &str) -> Option<&Caller> {
        let mut found = None;
        for (token, caller) in &self.0 {
            if same(token.as_bytes(), given.as_bytes()) {
                found = Some(caller);
            }
        }
        found
    }
}

fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |sum, (x, y)| sum | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_find_their_user_and_nothing_else_does() {
        let mut tokens = Tokens::default();
        tokens.insert("secret-one".into(), Caller::of_uid(0, None));
        assert_eq!(tokens.find("secret-one").map(|c| c.uid), Some(0));
        for wrong in ["", "secret-on", "secret-one ", "secret-two"] {
            assert!(tokens.find(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn users_are_known_by_name_and_number() {
        assert_eq!(Caller::of_name("root").map(|c| c.uid), Some(0));
        assert_eq!(Caller::of_uid(0, None).name, "root");
        let nobody = Caller::of_uid(4_000_000, Some(7));
        assert_eq!((nobody.gid, nobody.name.as_str()), (7, "4000000"));
        assert!(Caller::of_uid(0, None).may_act_for(1000));
        assert!(nobody.may_act_for(4_000_000) && !nobody.may_act_for(1000));
    }
}
