//! pagedkv.
