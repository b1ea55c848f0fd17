"""The nodes of an AWS Batch job, as a cluster that its main node launches on."""
