"""Operations: the stages of a message on its way to a launch, and their observers."""
