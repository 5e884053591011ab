#!/bin/sh
# An authority of your own, and a certificate of the server by it. Sites need ca.pem; ca.key stays where nobody else reads it.
#
#     sh certificates.sh server.example            # writes ca.key, ca.pem, server.key and server.pem into this folder
#     sh certificates.sh 10.0.0.1 server.example   # several names or addresses
set -eu
umask 077
: "${1:?the names or the addresses by which sites reach the server}"
# the proxy and the server's own programs reach the SuperLink by this address
names=IP:127.0.0.1
for host; do
    case $host in
        *[!0-9.]*) names=$names,DNS:$host ;;
        *) names=$names,IP:$host ;;
    esac
done
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=clinics \
    -keyout ca.key -out ca.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" -keyout server.key -out server.csr
echo "subjectAltName=$names" > server.ext
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -extfile server.ext -out server.pem
rm server.csr server.ext
