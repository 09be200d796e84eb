//! One error type: the status an engine acts on, the argument it names, and the text for its author.

use std::fmt;

/// Why a call was refused. The numbers are the ABI's and are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    Null = 100,
    Value = 101,
    Shape = 102,
    Dtype = 103,
    Alignment = 104,
    Workspace = 105,
    PageTable = 106,
    Abi = 107,
    Unsupported = 200,
    NoDevice = 201,
    NoMemory = 202,
    Device = 203,
    Internal = 300,
}

#[derive(Clone, Debug)]
pub struct Error {
    pub status: Status,
    /// The driver's own code (CUresult) where there is one, else 0.
    pub native_code: i32,
    /// Path of the argument as the caller wrote it: `params.q.shape[1]`.
    pub argument: String,
    pub message: String,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn new(status: Status, argument: impl Into<String>, message: impl Into<String>) -> Self {
        Error { status, native_code: 0, argument: argument.into(), message: message.into() }
    }

    pub fn null(argument: impl Into<String>) -> Self {
        Self::new(Status::Null, argument, "is NULL, must point to valid memory")
    }

    pub fn value(argument: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(Status::Value, argument, message)
    }

    pub fn shape(argument: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(Status::Shape, argument, message)
    }

    pub fn dtype(argument: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(Status::Dtype, argument, message)
    }

    pub fn alignment(argument: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(Status::Alignment, argument, message)
    }

    pub fn page_table(argument: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(Status::PageTable, argument, message)
    }

    pub fn unsupported(argument: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(Status::Unsupported, argument, message)
    }

    pub fn no_memory(argument: impl Into<String>, bytes: usize) -> Self {
        Self::new(Status::NoMemory, argument, format!("could not allocate {bytes} bytes"))
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Status::Internal, "", message)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.argument.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.argument, self.message)
        }
    }
}

impl std::error::Error for Error {}
