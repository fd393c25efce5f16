"""Operations: their arguments, checks and the operations prepared from them."""
