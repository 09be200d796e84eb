//! The CUDA backend: the driver, loaded at run time, and a file a kernel.

use crate::context::Log;
use crate::error::{Error, Result, Status};
use crate::plan::Stream;

/// A CUDA device, its primary context retained.
#[derive(Debug)]
pub struct Device(());

/// Device memory, freed on drop.
#[derive(Debug)]
pub struct DeviceBuffer(());

impl DeviceBuffer {
    pub fn as_ptr(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
}

impl Device {
    pub fn open(_ordinal: i32, _log: &Log) -> Result<Self> {
        Err(Error::new(Status::NoDevice, "options.backend", "no CUDA driver"))
    }

    pub fn zeroed(&self, bytes: usize, argument: &str) -> Result<DeviceBuffer> {
        Err(Error::no_memory(argument, bytes))
    }

    pub fn stream_ordered(&self, bytes: usize, _stream: Stream, argument: &str) -> Result<DeviceBuffer> {
        Err(Error::no_memory(argument, bytes))
    }
}
