//! Walking the rows of a ragged tensor: tasks of a size worth a thread's while, and each row's slot in the cache without a search or a division a row.

use crate::batch::{Batch, BufferRows};
use std::ops::Range;

/// Bytes a task should move at least: some microseconds of work.
const TASK_BYTES: usize = 64 << 10;

/// Rows a task takes.
pub fn per_task(row_bytes: usize) -> usize {
    TASK_BYTES.div_ceil(row_bytes.max(1))
}

/// Rows of task `i`.
pub fn of_task(i: usize, per_task: usize, total: usize) -> Range<usize> {
    i * per_task..(i * per_task + per_task).min(total)
}

/// Rows that lie one after the other by sequence, at rising positions.
pub trait Ragged {
    fn rows(&self, b: usize) -> Range<usize>;
    fn first_position(&self, b: usize) -> usize;
    /// Sequence and position of a row.
    fn locate(&self, row: usize) -> (usize, usize);
}

impl Ragged for Batch<'_> {
    fn rows(&self, b: usize) -> Range<usize> {
        Batch::rows(self, b)
    }
    fn first_position(&self, b: usize) -> usize {
        self.cache_length(b)
    }
    fn locate(&self, row: usize) -> (usize, usize) {
        self.position(row)
    }
}

impl Ragged for BufferRows<'_> {
    fn rows(&self, b: usize) -> Range<usize> {
        BufferRows::rows(self, b)
    }
    fn first_position(&self, b: usize) -> usize {
        BufferRows::first_position(self, b)
    }
    fn locate(&self, row: usize) -> (usize, usize) {
        BufferRows::locate(self, row)
    }
}

/// Where a row lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    pub row: usize,
    pub position: usize,
    pub block: usize,
    pub slot: usize,
}

/// Places of some rows in turn.
#[derive(Debug)]
pub struct Places<'a, R> {
    ragged: &'a R,
    batch: &'a Batch<'a>,
    table: &'a [u32],
    row: usize,
    end: usize,
    sequence: usize,
    sequence_end: usize,
    position: usize,
    page: usize,
    slot: usize,
}

impl<'a, R: Ragged> Places<'a, R> {
    /// `rows` of `ragged`, whose pages are `batch`'s.
    pub fn new(ragged: &'a R, batch: &'a Batch<'a>, rows: Range<usize>) -> Self {
        let mut out = Places {
            ragged,
            batch,
            table: &[],
            row: rows.start,
            end: rows.end,
            sequence: 0,
            sequence_end: 0,
            position: 0,
            page: 0,
            slot: 0,
        };
        if !rows.is_empty() {
            let (b, p) = ragged.locate(rows.start);
            out.enter(b, p);
        }
        out
    }

    fn enter(&mut self, b: usize, p: usize) {
        self.sequence = b;
        self.sequence_end = self.ragged.rows(b).end;
        self.table = self.batch.table_row(b);
        self.position = p;
        (self.page, self.slot) = (p / self.batch.page_size, p % self.batch.page_size);
    }
}

impl<R: Ragged> Iterator for Places<'_, R> {
    type Item = Place;

    #[inline(always)]
    fn next(&mut self) -> Option<Place> {
        if self.row == self.end {
            return None;
        }
        while self.row == self.sequence_end {
            let b = self.sequence + 1;
            self.enter(b, self.ragged.first_position(b));
        }
        let place =
            Place { row: self.row, position: self.position, block: self.table[self.page] as usize, slot: self.slot };
        self.row += 1;
        self.position += 1;
        self.slot += 1;
        if self.slot == self.batch.page_size {
            (self.page, self.slot) = (self.page + 1, 0);
        }
        Some(place)
    }
}
