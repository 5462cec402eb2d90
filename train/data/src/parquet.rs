//! `.parquet` files: every value of the string column `text` is one document.

use super::document::{DocumentReader, DocumentText};
use super::progress::Counted;
use super::{DataError, Result};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::{ByteArray, ByteArrayType};
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::{FileReader, SerializedFileReader};
use std::fs::File;
use std::io::Cursor;
use std::path::{Path, PathBuf};

/// Rows decoded at a time: amortizes the decoding overhead while limiting the memory.
const ROWS: usize = 64;

pub(super) struct ParquetFile {
    path: PathBuf,
    file: SerializedFileReader<File>,
    column: usize,
    next_group: usize,
    current: Option<ColumnReaderImpl<ByteArrayType>>,
    /// Decoded values not yet returned.
    values: std::vec::IntoIter<ByteArray>,
}

impl ParquetFile {
    pub(super) fn new(file: File, path: &Path) -> Result<Self> {
        let file = SerializedFileReader::new(file).map_err(failed(path))?;
        let schema = file.metadata().file_metadata().schema_descr_ptr();
        let column = schema
            .columns()
            .iter()
            .position(|column| column.path().string() == "text" && column.max_rep_level() == 0)
            .ok_or_else(|| DataError::Parquet {
                path: path.to_path_buf(),
                problem: "there is no column `text`".to_owned(),
            })?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            column,
            next_group: 0,
            current: None,
            values: Vec::new().into_iter(),
        })
    }

    /// Opens the column in the next row group; `false` after the last one.
    fn open_group(&mut self) -> Result<bool> {
        if self.next_group == self.file.num_row_groups() {
            return Ok(false);
        }
        let reader = self
            .file
            .get_row_group(self.next_group)
            .and_then(|group| group.get_column_reader(self.column))
            .map_err(failed(&self.path))?;
        let ColumnReader::ByteArrayColumnReader(reader) = reader else {
            return Err(DataError::Parquet {
                path: self.path.clone(),
                problem: "the column `text` does not hold strings".to_owned(),
            });
        };
        self.next_group += 1;
        self.current = Some(reader);
        Ok(true)
    }
}

impl DocumentReader for ParquetFile {
    fn next_document(&mut self, _: &mut Counted) -> Result<Option<DocumentText>> {
        loop {
            if let Some(value) = self.values.next() {
                // The column may hold bytes that are not UTF-8.
                let text = value.as_utf8().map_err(failed(&self.path))?.to_owned();
                return Ok(Some(Box::new(Cursor::new(text))));
            }
            let Some(reader) = &mut self.current else {
                if self.open_group()? {
                    continue;
                }
                return Ok(None);
            };
            let mut values = Vec::with_capacity(ROWS);
            // Definition levels are 0 for nulls; `values` contains no entry for them.
            let mut levels = Vec::with_capacity(ROWS);
            let (rows, ..) = reader
                .read_records(ROWS, Some(&mut levels), None, &mut values)
                .map_err(failed(&self.path))?;
            if rows == 0 {
                self.current = None;
            }
            self.values = values.into_iter();
        }
    }
}

fn failed(path: &Path) -> impl FnOnce(ParquetError) -> DataError {
    let path = path.to_path_buf();
    move |error| DataError::Parquet { path, problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::parquet::basic::Compression;
    use ::parquet::data_type::Int64Type;
    use ::parquet::file::properties::WriterProperties;
    use ::parquet::file::writer::SerializedFileWriter;
    use ::parquet::schema::parser::parse_message_type;
    use std::io::Read;
    use std::sync::Arc;

    fn write(path: &Path, column: &str, groups: &[&[Option<&str>]]) {
        let schema = format!("message m {{ required int64 id; optional binary {column} (UTF8); }}");
        let schema = Arc::new(parse_message_type(&schema).unwrap());
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
        let file = File::create(path).unwrap();
        let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
        for group in groups {
            let mut row_group = writer.next_row_group().unwrap();
            let mut numbers = row_group.next_column().unwrap().unwrap();
            let ids: Vec<i64> = (0..group.len() as i64).collect();
            numbers.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
            numbers.close().unwrap();
            let mut texts = row_group.next_column().unwrap().unwrap();
            let values: Vec<ByteArray> = group.iter().flatten().map(|text| ByteArray::from(*text)).collect();
            let levels: Vec<i16> = group.iter().map(|text| i16::from(text.is_some())).collect();
            texts.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            texts.close().unwrap();
            row_group.close().unwrap();
        }
        writer.close().unwrap();
    }

    fn open(path: &Path) -> Result<ParquetFile, DataError> {
        ParquetFile::new(File::open(path).unwrap(), path)
    }

    #[test]
    fn all_row_groups_are_read_without_nulls() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        let many = vec![Some("many"); 3 * ROWS + 1];
        write(&path, "text", &[&[Some("one"), None, Some("två")], &many]);
        let mut file = open(&path).unwrap();
        let mut texts = Vec::new();
        while let Some(mut document) = file.next_document(&mut Counted::default()).unwrap() {
            let mut text = String::new();
            document.read_to_string(&mut text).unwrap();
            texts.push(text);
        }
        assert_eq!(texts[..3], ["one", "två", "many"]);
        assert_eq!(texts.len(), 2 + many.len());
    }

    #[test]
    fn missing_column_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        write(&path, "body", &[&[Some("one")]]);
        let error = open(&path).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("there is no column `text`"), "{error}");
        std::fs::write(&path, "not parquet").unwrap();
        assert!(matches!(open(&path), Err(DataError::Parquet { .. })));
    }
}
