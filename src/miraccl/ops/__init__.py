"""Operations: argument checks and the reader of array protocols."""
