"""Steps of an optimizer whose state is on storage, beside ZeRO-Infinity and fio."""
