"""Random input to everything that reads any: what is drawn, what it is given to, and the room where that is done."""
