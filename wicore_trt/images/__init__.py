"""Make of image files what an encoder of images reads."""
