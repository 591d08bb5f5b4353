//! The commands of version 3: a module and a verb, with lists as tables or comma-separated.
//!
//! Absent: named servers and namespaces, configuration files, static partitions, memory accounting.

use super::daemon::{Daemon, command_of, device_facts, uuid_text};

/// How a list is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    csv: bool,
    header: bool,
}

impl Layout {
    /// `--format=csv` and `--format=csv,noheader`; a table without.
    fn parse(words: &[&str]) -> Result<Layout, String> {
        let mut layout = Layout { csv: false, header: true };
        for word in words {
            let Some(format) = word.strip_prefix("--format=") else { continue };
            for part in format.split(',') {
                match part {
                    "csv" => layout.csv = true,
                    "noheader" => layout.header = false,
                    _ => return Err(format!("{word} is not a format: csv, noheader")),
                }
            }
        }
        Ok(layout)
    }

    fn write(self, head: &[&str], rows: Vec<Vec<String>>) -> String {
        let head = self.header.then(|| head.iter().map(|word| (*word).to_owned()).collect());
        let all: Vec<Vec<String>> = head.into_iter().chain(rows).collect();
        let widest = |column: usize| all.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let line = |row: &Vec<String>| {
            if self.csv {
                return row.join(",");
            }
            let cells = row.iter().enumerate();
            let cells = cells.map(|(i, cell)| format!("{cell:<width$}", width = widest(i)));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        all.iter().map(|row| line(row) + "\n").collect()
    }
}

/// The number behind `--NAME=`, if it is given.
fn option(words: &[&str], name: &str) -> Result<Option<u32>, String> {
    let given = words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    given.map(|text| text.parse().map_err(|_| format!("{name}={text}: not a number"))).transpose()
}

impl Daemon {
    pub(super) fn module_verb(&mut self, words: &[&str]) -> Result<String, String> {
        let layout = Layout::parse(words)?;
        match words {
            ["server", "list", ..] => Ok(self.list_servers(layout)),
            ["server", "create", ..] => {
                let uid = option(words, "--uid")?.ok_or("server create --uid=USER")?;
                self.server_of_user(uid)
            }
            ["client", "list", ..] => self.list_clients(words, layout),
            ["client", "terminate", pid, ..] => {
                let client = pid.parse().map_err(|_| format!("{pid} is not a PID"))?;
                let servers: Vec<u32> = self.servers.keys().copied().collect();
                let of = servers.into_iter().find(|s| self.clients_of(*s).contains(&client));
                self.throw_out(of.ok_or(format!("Client {client} not found"))?, client);
                Ok(String::new())
            }
            ["device", "list", ..] => Ok(self.list_devices(layout)),
            _ => Err(format!("Unknown command: {}", words.join(" "))),
        }
    }

    fn list_servers(&self, layout: Layout) -> String {
        let row = |(pid, server): (&u32, &super::servers::Server)| {
            vec![pid.to_string(), server.uid.to_string(), server.status.word().to_owned()]
        };
        layout.write(&["PID", "UID", "STATUS"], self.servers.iter().map(row).collect())
    }

    fn list_clients(&self, words: &[&str], layout: Layout) -> Result<String, String> {
        let wanted = option(words, "--server")?;
        if let Some(pid) = wanted
            && !self.servers.contains_key(&pid)
        {
            return Err(format!("Server {pid} not found"));
        }
        let mut rows = Vec::new();
        for server in self.servers.keys().filter(|pid| wanted.is_none_or(|w| w == **pid)) {
            for client in self.clients_of(*server) {
                rows.push(vec![client.to_string(), server.to_string(), command_of(client)]);
            }
        }
        Ok(layout.write(&["PID", "SERVER", "COMMAND"], rows))
    }

    fn list_devices(&self, layout: Layout) -> String {
        let mut rows = Vec::new();
        for gpu in &self.options.gpus {
            if let Some(facts) = device_facts(&self.options.node, *gpu) {
                let clients = self.clients_on(*gpu).len();
                rows.push(vec![gpu.to_string(), uuid_text(&facts), clients.to_string()]);
            }
        }
        layout.write(&["GPU", "UUID", "CLIENTS"], rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_tables_or_comma_separated() {
        let rows =
            || vec![vec!["1".to_owned(), "two".to_owned()], vec!["30".to_owned(), "4".to_owned()]];
        let write = |words: &[&str]| Layout::parse(words).map(|l| l.write(&["A", "B"], rows()));
        assert_eq!(write(&["x", "list"]).unwrap(), "A   B\n1   two\n30  4\n");
        assert_eq!(write(&["--format=csv"]).unwrap(), "A,B\n1,two\n30,4\n");
        assert_eq!(write(&["--format=csv,noheader"]).unwrap(), "1,two\n30,4\n");
        assert!(write(&["--format=json"]).unwrap_err().contains("json"));
        assert_eq!(option(&["--uid=7"], "--uid"), Ok(Some(7)));
        assert!(option(&["--uid=me"], "--uid").unwrap_err().contains("me"));
    }
}
