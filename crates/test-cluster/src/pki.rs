//! Throw-away certificates: one authority, one server, one administrator, one key that signs the
//! tokens of service accounts.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

use crate::Error;

/// Where the files are.
#[derive(Debug, Clone)]
pub struct Pki {
    folder: PathBuf,
}

impl Pki {
    /// Makes everything in a folder.
    pub fn create(folder: &Path) -> Result<Self, Error> {
        fs::create_dir_all(folder).map_err(|source| Error::File {
            action: "create",
            path: folder.to_owned(),
            source,
        })?;
        let pki = Pki { folder: folder.to_owned() };
        let ca_key = key("the authority")?;
        let mut ca = CertificateParams::default();
        ca.distinguished_name.push(DnType::CommonName, "muxflow-test-authority");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let ca_certificate = ca.self_signed(&ca_key).map_err(failed("the authority"))?;
        pki.write("ca.crt", &ca_certificate.pem())?;
        let issuer = Issuer::new(ca, ca_key);
        pki.leaf(&issuer, "server", "kube-apiserver", None, true)?;
        pki.leaf(&issuer, "admin", "muxflow-test-admin", Some("system:masters"), false)?;
        let accounts = key("the service accounts")?;
        pki.write("accounts.key", &accounts.serialize_pem())?;
        pki.write("accounts.pub", &accounts.public_key_pem())?;
        Ok(pki)
    }

    /// One of the files.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Error> {
        let path = self.path(name);
        fs::write(&path, text).map_err(|source| Error::File { action: "write", path, source })
    }

    fn leaf(
        &self,
        issuer: &Issuer<'_, KeyPair>,
        file: &str,
        name: &str,
        group: Option<&str>,
        server: bool,
    ) -> Result<(), Error> {
        let key = key(name)?;
        let mut leaf = CertificateParams::default();
        leaf.distinguished_name.push(DnType::CommonName, name);
        if let Some(group) = group {
            leaf.distinguished_name.push(DnType::OrganizationName, group);
        }
        if server {
            leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            for ip in [[127, 0, 0, 1], [10, 0, 0, 1]] {
                leaf.subject_alt_names.push(SanType::IpAddress(ip.into()));
            }
            let localhost = "localhost".try_into().map_err(failed(name))?;
            leaf.subject_alt_names.push(SanType::DnsName(localhost));
        } else {
            leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        }
        let certificate = leaf.signed_by(&key, issuer).map_err(failed(name))?;
        self.write(&format!("{file}.crt"), &certificate.pem())?;
        self.write(&format!("{file}.key"), &key.serialize_pem())
    }
}

fn key(subject: &str) -> Result<KeyPair, Error> {
    KeyPair::generate().map_err(failed(subject))
}

fn failed(subject: &str) -> impl Fn(rcgen::Error) -> Error {
    let subject = subject.to_owned();
    move |source| Error::Certificate { subject: subject.clone(), source }
}
