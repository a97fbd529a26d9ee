"""Which experts matter: corpora, the statistics of a calibration run, and plans cut from them."""
