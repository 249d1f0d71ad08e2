"""Running a model: in torch, in the LiteRT interpreter, in LiteRT-LM; native code in children."""
