"""What `headrace doctor` knows of boards: facts read from files, and judgements on them."""
