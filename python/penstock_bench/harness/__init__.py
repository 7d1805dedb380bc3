"""The machine, processes, page cache and fio, as every suite uses them."""
