"""The operations, one file a family: schema, fake, launcher, autograd.Function and public function."""
