module pagedkv.example

go 1.21
