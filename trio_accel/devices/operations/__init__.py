"""Operations: what a message becomes on its way to a launch, and who sees it on the way."""
